package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
)

const (
	// imageTime is the time stamp of every file of every image: 2025-01-01. The same files make the same
	// image, and it is late enough for zip archives, which cannot say 1970.
	imageTime = 1735689600
	// imageUUID is every image's: the digest tells them apart, and the same files must make the same bytes.
	imageUUID = "5a4d1075-0000-4000-8000-000000000001"
)

// makeImage writes j's stack of layers as an EROFS image to file.
//
// noinline_data is not the default and must be given: gVisor maps file data in whole pages, and answers reads
// of data that sits behind an inode with "bad address". Nothing is compressed for the same reason.
func makeImage(ctx context.Context, j job, file string, limit int64, out io.Writer) error {
	mkfs, err := exec.LookPath("mkfs.erofs")
	if err != nil {
		return errors.New("this host has no mkfs.erofs; install erofs-utils")
	}
	j.Action = actionImage
	j.Argv = []string{mkfs, "--quiet", "-E", "noinline_data", "-T", strconv.Itoa(imageTime), "-U", imageUUID, file, j.Mount}
	j.Env = os.Environ()
	if err := runJob(ctx, j, nil, out); err != nil {
		return err
	}
	info, err := os.Lstat(file)
	if err != nil {
		return err
	}
	if info.Size() > limit {
		return fmt.Errorf("the image has %d MiB, over the limit of %d", info.Size()>>20, limit>>20)
	}
	return nil
}
