package route

import (
	"net/url"
	"strconv"

	"sandlot"
)

func parseQuery(raw string) (url.Values, error) {
	if len(raw) > 16<<10 {
		return nil, strconv.ErrRange
	}
	return url.ParseQuery(raw)
}

// Query is a query parameter, "" when it is absent.
func (q *Request) Query(name string) string { return q.R.URL.Query().Get(name) }

// QueryInt is an integer parameter within bounds, or deflt when it is absent.
func (q *Request) QueryInt(name string, deflt, low, high int64) (int64, error) {
	s := q.Query(name)
	if s == "" {
		return deflt, nil
	}
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil || v < low || v > high {
		return 0, sandlot.Errorf(sandlot.CodeInvalidRequest, "%s must be a number between %d and %d", name, low, high).With("field", name)
	}
	return v, nil
}

// QueryBool is a flag: 1 or true, 0 or false, absent is false.
func (q *Request) QueryBool(name string) (bool, error) {
	switch q.Query(name) {
	case "", "0", "false":
		return false, nil
	case "1", "true":
		return true, nil
	}
	return false, sandlot.Errorf(sandlot.CodeInvalidRequest, "%s must be 1 or 0", name).With("field", name)
}
