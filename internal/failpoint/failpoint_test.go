package failpoint

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"
)

var _ = Declare("test.a", "test.b")

func TestHit(t *testing.T) {
	ctx := t.Context()
	if err := Hit(ctx, "test.a"); err != nil {
		t.Fatalf("unarmed point returned %v", err)
	}
	disarm, err := Arm("test.a=error@2, test.b=sleep:1h")
	if err != nil {
		t.Fatal(err)
	}
	defer disarm()
	for i, want := range []bool{false, true, false} {
		if got := Hit(ctx, "test.a"); errors.Is(got, ErrInjected) != want {
			t.Errorf("hit %d: %v", i+1, got)
		}
	}
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if err := Hit(short, "test.b"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a sleeping point must end with its context: %v", err)
	}
	disarm()
	if err := Hit(ctx, "test.a"); err != nil {
		t.Errorf("disarmed point returned %v", err)
	}
}

func TestArmRefuses(t *testing.T) {
	for _, spec := range []string{"nobody=error", "test.a", "test.a=maybe", "test.a=sleep:x", "test.a=error@0"} {
		if _, err := Arm(spec); err == nil {
			t.Errorf("%q was accepted", spec)
		}
	}
	if !slices.Contains(Names(), "test.a") {
		t.Error("a declared name is not listed")
	}
}

func BenchmarkHitUnarmed(b *testing.B) {
	for b.Loop() {
		_ = Hit(context.Background(), "test.a")
	}
}
