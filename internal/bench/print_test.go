// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func sampleOf(target string, round int, requests uint64, busy float64) Sample {
	return Sample{
		Target: target, Round: round, Busy: busy,
		Client: ClientReport{Seconds: 2, Requests: requests, Latency: &Latency{P50: 10, P99: 20, P999: 30, Max: 40}},
	}
}

func resultOfTwo() *Result {
	r := &Result{
		Plan:  Plan{Title: "a title", Rounds: 2, Targets: []Target{{Name: "a"}, {Name: "b"}}},
		Idle:  []float64{0.1, 0.1},
		Cases: []CaseResult{{Load: Load{Mode: RR, Bytes: 200, Connections: 1, Duration: time.Second}}},
	}
	r.Cases[0].Samples = []Sample{
		sampleOf("a", 0, 1, 9), sampleOf("b", 0, 1e6, 9), // the warm-up must not count
		sampleOf("b", 1, 1000, 0.4), sampleOf("a", 1, 2000, 0.4),
		sampleOf("a", 2, 4000, 0.6), sampleOf("b", 2, 1000, 0.4),
	}
	r.Cases[0].evaluate(r.Plan, 0.1)
	return r
}

func TestEvaluate(t *testing.T) {
	c := resultOfTwo().Cases[0]
	if got, want := c.Summaries[0].Rate, (Spread{1500, 1000, 2000}); got != want {
		t.Errorf("rate of a: %v, want %v", got, want)
	}
	if got, want := c.Comparisons[0].Rate, (Spread{3, 2, 4}); got != want {
		t.Errorf("rate a ÷ b: %v, want %v", got, want)
	}
	// Busy 0.4 s less 2 s of 0.1 idle is 0.2 s for 1000 requests.
	if got := c.Summaries[1].CPU.Median; got < 199.9 || got > 200.1 {
		t.Errorf("CPU of b: %v µs for each request, want 200", got)
	}
}

func TestPrint(t *testing.T) {
	var out strings.Builder
	if err := resultOfTwo().Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a title", "rr 200 B × 1", "a ÷ b", "3.000 (2.000–4.000)", "10.0 % and 10.0 % of one CPU\n", "as the scheduler chooses"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if !strings.Contains(warning([]float64{0, 0.5}), "other work") {
		t.Error("no warning of a machine at work")
	}
	if err := resultOfTwo().Print(failing{}); err == nil {
		t.Error("no error from a writer that fails")
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("full") }
