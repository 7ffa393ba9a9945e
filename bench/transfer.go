package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/guest"
	"sandlot/internal/template"
	"sandlot/internal/wire"
)

// zeros is an endless reader of zeros.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// transfer moves a large file both ways through the API, and as many bytes through an agent's bare stream.
func transfer(ctx context.Context, b *bench) error {
	if err := channelSpeed(ctx, b); err != nil {
		return err
	}
	s, sb, err := b.box(ctx)
	if err != nil {
		return err
	}
	path := "/" + sb.ID + "/files/content?path=big"
	before, peak := s.RSS(), 0.0
	watch, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for watch.Err() == nil {
			peak = max(peak, s.RSS())
			time.Sleep(20 * time.Millisecond)
		}
	})
	var up, down []float64
	for range b.n(5) {
		begun := time.Now()
		resp, err := s.Upload(ctx, path, io.LimitReader(zeros{}, fileBytes), fileBytes)
		if err != nil {
			stop()
			return err
		}
		resp.Body.Close()
		up = append(up, mbps(fileBytes, time.Since(begun)))
		begun = time.Now()
		if resp, err = s.Request(ctx, "GET", path, nil); err != nil {
			stop()
			return err
		}
		n, err := io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil || n != fileBytes {
			stop()
			return fmt.Errorf("download: %d bytes, %w", n, err)
		}
		down = append(down, mbps(n, time.Since(begun)))
	}
	stop()
	wg.Wait()
	b.metric("upload", "MB/s", up)
	b.metric("download", "MB/s", down)
	b.ratio("upload_vs_channel", "upload", "channel_up", ">=0.7")
	b.ratio("download_vs_channel", "download", "channel_down", ">=0.7")
	b.ratio("upload_vs_path", "upload", "path_up", "none")
	b.ratio("download_vs_path", "download", "path_down", "none")
	b.metric("upload_rss_growth_mb", "MB", []float64{max(0, peak-before)}) // bar: < 16
	return s.Delete(ctx, sb.ID)
}

// withAgent makes a machine without a server and gives its agent to f.
func (b *bench) withAgent(ctx context.Context, f func(*guest.Client) error) (err error) {
	dir, err := os.MkdirTemp(b.dir, "agent-")
	if err != nil {
		return err
	}
	store, err := template.Open(b.templates)
	if err != nil {
		return err
	}
	tpl, err := store.Get(peerTemplate)
	if err != nil {
		return err
	}
	eng, err := gvisor.New(ctx, gvisor.Config{StateDir: dir, Runsc: filepath.Join(b.bin, "runsc"), Agent: filepath.Join(b.bin, "sandlot-agent")})
	if err != nil {
		return err
	}
	m, _, err := eng.Create(ctx, engine.Spec{ID: sandlot.NewID(sandlot.PrefixSandbox), Template: tpl, Size: tpl.Size})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Destroy(ctx), eng.Remove(ctx)) }()
	c := guest.New(m.Dial)
	defer c.Close()
	if err := c.Identify(ctx, wire.Identity{ID: "sbxbench", Now: time.Now()}); err != nil {
		return err
	}
	return f(c)
}

// channelSpeed measures an agent's stream with nothing but the agent behind it.
func channelSpeed(ctx context.Context, b *bench) error {
	return b.withAgent(ctx, func(c *guest.Client) error {
		var up, down []float64
		for range b.n(5) {
			begun := time.Now()
			if err := c.BenchSink(ctx, io.LimitReader(zeros{}, fileBytes), fileBytes); err != nil {
				return err
			}
			up = append(up, mbps(fileBytes, time.Since(begun)))
			begun = time.Now()
			body, err := c.BenchSource(ctx, fileBytes)
			if err != nil {
				return err
			}
			n, err := io.Copy(io.Discard, body)
			body.Close()
			if err != nil || n != fileBytes {
				return fmt.Errorf("source: %d bytes, %w", n, err)
			}
			down = append(down, mbps(n, time.Since(begun)))
		}
		b.metric("channel_up", "MB/s", up)
		b.metric("channel_down", "MB/s", down)
		return pathSpeed(ctx, b, c)
	})
}

// pathSpeed moves as many bytes over the hops that the API's take, with nobody but copiers on them: a client, a TCP
// connection, a relay, the agent's stream. It has as many parties for the CPUs as a transfer has.
func pathSpeed(ctx context.Context, b *bench, c *guest.Client) error {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer ln.Close()
	pass := func(client, relay func(net.Conn) error) (float64, error) {
		begun := time.Now()
		done := make(chan error, 1)
		go func() {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", ln.Addr().String())
			if err == nil {
				err = errors.Join(client(conn), conn.Close())
			}
			done <- err
		}()
		conn, err := ln.Accept()
		if err != nil {
			return 0, err
		}
		defer conn.Close()
		err = errors.Join(relay(conn), <-done)
		return mbps(fileBytes, time.Since(begun)), err
	}
	var up, down []float64
	for range b.n(5) {
		speed, err := pass(func(conn net.Conn) error {
			_, err := io.CopyN(conn, zeros{}, fileBytes)
			return err
		}, func(conn net.Conn) error {
			return c.BenchSink(ctx, io.LimitReader(conn, fileBytes), fileBytes)
		})
		if err != nil {
			return err
		}
		up = append(up, speed)
		speed, err = pass(func(conn net.Conn) error {
			_, err := io.CopyN(io.Discard, conn, fileBytes)
			return err
		}, func(conn net.Conn) error {
			body, err := c.BenchSource(ctx, fileBytes)
			if err != nil {
				return err
			}
			defer body.Close()
			_, err = io.CopyBuffer(struct{ io.Writer }{conn}, body, make([]byte, 256<<10))
			return err
		})
		if err != nil {
			return err
		}
		down = append(down, speed)
	}
	b.metric("path_up", "MB/s", up)
	b.metric("path_down", "MB/s", down)
	return nil
}
