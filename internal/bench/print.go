// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Print writes the result for people: what was measured, a line for each load
// and target, then the ratios.
func (r *Result) Print(out io.Writer) error {
	w := &writer{w: out}
	w.printf("%s\n", r.Plan.Title)
	for _, t := range r.Plan.Targets {
		w.printf("  %-14s %s\n", t.Name, t.About)
	}
	w.printf("  %d rounds in turns after a warm-up; median (min–max); %s\n", r.Plan.Rounds, placement(r.Plan.Pin))
	w.printf("  idle machine: %s CPU%s\n", percents(r.Idle), warning(r.Idle))
	w.printf("  Linux %s, %s × %d, commit %s, load %s\n\n", r.Facts.Kernel, r.Facts.CPUModel, r.Facts.CPUs, r.Facts.Commit, r.Facts.Load)
	r.printSummaries(w)
	if len(r.Plan.Targets) > 1 {
		w.printf("\n")
		r.printComparisons(w)
	}
	return w.err
}

func (r *Result) printSummaries(out *writer) {
	t := &writer{w: tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)}
	t.printf("load\tpath\trate/s\tp50 µs\tp99 µs\tp99.9 µs\tmax µs\tCPU µs each\tclient\t\n")
	for _, c := range r.Cases {
		for _, s := range c.Summaries {
			if c.Load.Mode == Stream {
				t.printf("%s\t%s\t%.2f Gbit\t\t\t\t\t%.1f /MB\t%.1f /MB\t\n", c.Load.Name(), s.Target, s.Rate.Median*8/1e9, s.CPU.Median, s.Client.Median)
				continue
			}
			t.printf("%s\t%s\t%.0f\t%.1f\t%.1f\t%.1f\t%.0f\t%.2f\t%.2f\t\n", c.Load.Name(), s.Target,
				s.Rate.Median, s.P50.Median, s.P99.Median, s.P999.Median, s.Max.Median, s.CPU.Median, s.Client.Median)
		}
	}
	out.flush(t)
}

func (r *Result) printComparisons(out *writer) {
	t := &writer{w: tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)}
	t.printf("load\tratio\trate\tp50\tp99\tCPU each\tof the client\t\n")
	for _, c := range r.Cases {
		for _, v := range c.Comparisons {
			t.printf("%s\t%s ÷ %s\t%s\t%s\t%s\t%s\t%s\t\n", c.Load.Name(), v.Target, v.Baseline,
				ratioText(v.Rate), ratioText(v.P50), ratioText(v.P99), ratioText(v.CPU), ratioText(v.Client))
		}
	}
	out.flush(t)
}

func ratioText(s Spread) string {
	if s == (Spread{}) {
		return ""
	}
	return fmt.Sprintf("%.3f (%.3f–%.3f)", s.Median, s.Min, s.Max)
}

func percents(fractions []float64) string {
	var out []string
	for _, f := range fractions {
		out = append(out, fmt.Sprintf("%.1f %%", 100*f))
	}
	if len(out) == 0 {
		return "not measured,"
	}
	return strings.Join(out, " and ") + " of one"
}

func placement(pin bool) string {
	if pin {
		return "client on processor 0, server on 1"
	}
	return "processors as the scheduler chooses"
}

// noisy is how much of one processor other work may take before a result says so.
const noisy = 0.1

func warning(idle []float64) string {
	if len(idle) > 0 && slices.Max(idle) > noisy {
		return "; other work was running: the figures below are not those of a quiet machine"
	}
	return ""
}

// writer keeps the first error.
type writer struct {
	w   io.Writer
	err error
}

func (w *writer) Write(b []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	n, err := w.w.Write(b)
	w.err = err
	return n, err
}

func (w *writer) printf(format string, args ...any) { fmt.Fprintf(w, format, args...) }

// flush ends a table that was written to t on top of w.
func (w *writer) flush(t *writer) {
	if f, ok := t.w.(*tabwriter.Writer); ok && w.err == nil {
		w.err = f.Flush()
	}
}
