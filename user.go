package sandlot

import "time"

// User is a person who belongs to projects.
type User struct {
	ID        ID
	Name      string
	CreatedAt time.Time
}

// Member gives a user a role in a project.
type Member struct {
	Project ID
	User    ID
	Role    Role
}

// rank orders roles.
func (r Role) rank() int {
	switch r {
	case RoleOwner:
		return 4
	case RoleAdmin:
		return 3
	case RoleDeveloper:
		return 2
	case RoleReadonly:
		return 1
	}
	return 0
}

// AtLeast says whether r includes everything that other may do. An unknown role includes nothing.
func (r Role) AtLeast(other Role) bool { return r.rank() > 0 && r.rank() >= other.rank() }

// Valid says whether r is one of the four roles.
func (r Role) Valid() bool { return r.rank() > 0 }
