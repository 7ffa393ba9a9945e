// Command bench measures Sandlot beside plain tools, on one machine in one run.
//
// It starts real servers, talks to them over HTTP, and prints a line for each figure
//
//	METRIC name unit p50=… p95=… p99=… n=…
//
// and, for each bar, the ratio to the plain tool that did the same work in the same run:
//
//	RATIO name value bar=…
//
// These machines are shared: quote ratios, not milliseconds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"sort"
	"syscall"
	"time"

	"sandlot/internal/devserver"
)

// figure is one group of measurements that share their preparation.
type figure struct {
	names string // what it prints, for -pattern
	run   func(context.Context, *bench) error
}

var figures = []figure{
	{"runsc_run_exec runsc_exec_true runsc_ours_run_exec runsc_ours_exec_true bwrap_true nspawn_true chroot_true", peers},
	{"create_warm_total create_warm_http create_first_exec create_warm_http_vs_runsc", createWarm},
	{"create_cold create_cold_first_exec create_cold_vs_runsc", createCold},
	{"exec_true exec_true_guest exec_true_chain exec_true_vs_guest exec_true_vs_runsc exec_sh", execTrue},
	{"exec_stream exec_stream_vs_runsc", execStream},
	{"upload download channel_up channel_down upload_vs_channel download_vs_channel path_up path_down upload_rss_growth_mb", transfer},
	{"creates_per_s_warm creates_per_s_dry", sustained},
	{"idle_pss_mb idle_cpu_percent idle_answer server_rss_mb", idle},
	{"cell_first cell_warm cell_warm_bridge cell_warm_vs_bridge", cellWarm},
	{"matplotlib_first matplotlib_second matplotlib_first_vs_native matplotlib_second_vs_native", cellChart},
	{"contexts_20 contexts_20_start kernel_pss_mb", contextsTwenty},
	{"terminal_echo", terminalEcho},
	{"list_1000", listThousand},
}

func main() {
	bin := flag.String("bin", ".sandlot/bin", "directory of sandlot, sandlot-agent and runsc")
	templates := flag.String("templates", "", "the template store")
	pattern := flag.String("pattern", "", "only figures whose names match this regular expression")
	quick := flag.Bool("quick", false, "fewer runs of each, to see that all of it works")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *bin, *templates, *pattern, *quick); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bin, templates, pattern string, quick bool) (err error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return err
	}
	b := &bench{quick: quick, medians: map[string]float64{}}
	if b.bin, err = filepath.Abs(bin); err != nil {
		return err
	}
	if b.templates, err = filepath.Abs(templates); err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp("", "sandlot-bench-"); err != nil {
		return err
	}
	defer func() {
		// The stop must happen also when ctx has ended.
		err = errors.Join(err, b.stopServer(), os.RemoveAll(b.dir))
	}()
	fmt.Printf("# %s, %d CPUs, %s\n", kernelRelease(), cpus(), time.Now().UTC().Format(time.RFC3339))
	var failed []error
	for _, f := range figures {
		if !re.MatchString(f.names) {
			continue
		}
		if err := f.run(ctx, b); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", f.names, err))
			fmt.Fprintln(os.Stderr, "bench:", failed[len(failed)-1])
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(failed...)
}

// bench is one run.
type bench struct {
	bin, templates, dir string
	quick               bool
	medians             map[string]float64
	srv                 *devserver.Server
	key                 string
}

// n is how often to do something: less in a quick run.
func (b *bench) n(full int) int {
	if b.quick {
		return max(3, full/10)
	}
	return full
}

// metric prints one figure's distribution and keeps its median.
func (b *bench) metric(name, unit string, values []float64) {
	if len(values) == 0 {
		return
	}
	sort.Float64s(values)
	at := func(p float64) float64 { return values[min(len(values)-1, int(p*float64(len(values))))] }
	b.medians[name] = at(0.5)
	fmt.Printf("METRIC %s %s p50=%.2f p95=%.2f p99=%.2f n=%d\n", name, unit, at(0.5), at(0.95), at(0.99), len(values))
}

// ratio prints the ratio of two figures' medians with the bar that it is held against, e.g. "<=0.05".
func (b *bench) ratio(name, over, under, bar string) {
	x, y := b.medians[over], b.medians[under]
	if x == 0 || y == 0 {
		fmt.Printf("RATIO %s missing (%s or %s was not measured) bar=%s\n", name, over, under, bar)
		return
	}
	fmt.Printf("RATIO %s %.3f bar=%s\n", name, x/y, bar)
}

// times runs f n times and returns how long each took, in ms.
func times(ctx context.Context, n int, f func(i int) error) ([]float64, error) {
	out := make([]float64, 0, n)
	for i := range n {
		if ctx.Err() != nil {
			return out, context.Cause(ctx)
		}
		begun := time.Now()
		if err := f(i); err != nil {
			return out, err
		}
		out = append(out, ms(time.Since(begun)))
	}
	return out, nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
