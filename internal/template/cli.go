package template

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"syscall"
)

// BuildMain is `sandlot template build`: it builds each definition folder into a store. It returns the exit
// code: 0, 1 when a build failed, 2 when the command line is wrong.
func BuildMain(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("sandlot template build", flag.ContinueOnError)
	flags.SetOutput(stderr)
	store := flags.String("store", "", "the template store's `folder`")
	cache := flags.String("cache", "", "the `folder` for cached layers")
	fresh := flags.Bool("fresh", false, "take nothing from the cache: packages as they are today")
	verbose := flags.Bool("v", false, "print the output of each step")
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: sandlot template build --store DIR --cache DIR DEFINITION-FOLDER...")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if *store == "" || *cache == "" || flags.NArg() == 0 {
		flags.Usage()
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	s, err := Open(*store)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	for _, dir := range flags.Args() {
		t, err := Build(ctx, dir, Options{CacheDir: *cache, Store: s, Log: stderr, Fresh: *fresh, Verbose: *verbose})
		if err != nil {
			fmt.Fprintln(stderr, err)
			return 1
		}
		fmt.Fprintf(stdout, "%s %s\n", t.Name, t.Digest)
	}
	return 0
}
