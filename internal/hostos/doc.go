// Package hostos makes the system calls about machines: processes by pid and start time, loop-mounted disk
// images, cgroups of both versions, network namespaces. Linux only; everything here needs root.
package hostos
