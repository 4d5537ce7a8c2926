// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
)

// report is what was done and what was found. The JSON is meant for machines.
type report struct {
	Families    []int    `json:"families"`
	Protocols   []string `json:"protocols"`
	Tunnel      string   `json:"tunnel"`
	Cases       int      `json:"cases"`
	FailedCases int      `json:"failedCases"`
	Steps       int      `json:"steps"`
	Probes      int      `json:"probes"` // without those skipped; a second look does not count
	Allowed     int      `json:"allowed"`
	Denied      int      `json:"denied"` // of Probes, as expected by cyclonus' matcher
	Self        int      `json:"self"`   // of Allowed: pods that probe themselves
	// PerProtocol counts Probes by "TCP/4" and so on.
	PerProtocol map[string]int `json:"perProtocol"`
	Skipped     int            `json:"skipped"`    // of protocols that were not asked for
	Impossible  int            `json:"impossible"` // for ports that no pod has
	Slow        int            `json:"slow"`       // reached as expected, but only with patience
	Mismatches  []mismatch     `json:"mismatches"`
	Seconds     float64        `json:"seconds"`
	Applying    float64        `json:"applyingSeconds"`
	Probing     float64        `json:"probingSeconds"`
}

// mismatch is a probe that ended otherwise than expected.
type mismatch struct {
	Case     string   `json:"case"`
	Step     int      `json:"step"` // from 1
	From     string   `json:"from"`
	To       string   `json:"to"`
	Address  string   `json:"address"`
	Protocol string   `json:"protocol"`
	Port     uint16   `json:"port"`
	Expected string   `json:"expected"`
	Why      string   `json:"why"`
	Got      string   `json:"got"`
	Later    string   `json:"later"` // what a second, patient look got
	Policies []string `json:"policies"`
}

func newReport(o options) *report {
	return &report{Families: o.families, Protocols: o.protocols, Tunnel: o.lab.Tunnel, PerProtocol: map[string]int{}, Mismatches: []mismatch{}}
}

func (r *report) count(k *check, tc string, step int, policies []*networkingv1.NetworkPolicy) {
	r.Probes++
	r.PerProtocol[fmt.Sprintf("%s/%d", k.job.Protocol, k.family)]++
	expected := "denied"
	if k.want {
		expected = "allowed"
		r.Allowed++
	} else {
		r.Denied++
	}
	if k.self {
		r.Self++
	}
	switch {
	case k.good():
		return
	case k.slow():
		r.Slow++
		return
	}
	m := mismatch{
		Case: tc, Step: step, From: k.from, To: k.to, Address: k.job.To.Addr().String(), Protocol: k.job.Protocol, Port: k.job.To.Port(),
		Expected: expected, Why: k.why, Got: k.got.String(), Policies: policyNames(policies),
	}
	if k.later != nil {
		m.Later = k.later.String()
	}
	r.Mismatches = append(r.Mismatches, m)
}

// print writes the report for people, with at most limit mismatches in full and
// all of them counted by kind.
func (r *report) print(w io.Writer, limit int) error {
	var b strings.Builder
	for i, m := range r.Mismatches {
		if i == limit {
			fmt.Fprintf(&b, "... and %d more\n", len(r.Mismatches)-limit)
			break
		}
		fmt.Fprintf(&b, "MISMATCH %s, step %d: %s -> %s (%s) %s/%d: expected %s (%s), got %s; later: %s\n",
			m.Case, m.Step, m.From, m.To, m.Address, m.Protocol, m.Port, m.Expected, m.Why, m.Got, m.Later)
	}
	for _, line := range r.kinds() {
		fmt.Fprintln(&b, line)
	}
	fmt.Fprintf(&b, "cyclonus: %d cases (%d with mismatches), %d steps, %d probes (%s): %d expected allowed (%d of a pod to itself), %d denied; %d mismatches, %d slow",
		r.Cases, r.FailedCases, r.Steps, r.Probes, r.perProtocol(), r.Allowed, r.Self, r.Denied, len(r.Mismatches), r.Slow)
	if r.Skipped > 0 {
		fmt.Fprintf(&b, ", %d skipped for their protocol", r.Skipped)
	}
	if r.Impossible > 0 {
		fmt.Fprintf(&b, ", %d for ports that the pods do not have", r.Impossible)
	}
	fmt.Fprintf(&b, "; %.1f s (%.1f s applying, %.1f s probing), tunnel %s\n", r.Seconds, r.Applying, r.Probing, r.Tunnel)
	_, err := io.WriteString(w, b.String())
	return err
}

// kinds counts the mismatches by what was expected and what came.
func (r *report) kinds() []string {
	counts := map[string]int{}
	for _, m := range r.Mismatches {
		got, _, _ := strings.Cut(m.Got, " ")
		counts[fmt.Sprintf("%s, expected %s, got %s", m.Protocol, m.Expected, got)]++
	}
	var lines []string
	for kind, n := range counts {
		lines = append(lines, fmt.Sprintf("mismatches: %7d  %s", n, kind))
	}
	slices.Sort(lines)
	return lines
}

func (r *report) perProtocol() string {
	var parts []string
	for name, n := range r.PerProtocol {
		protocol, family, _ := strings.Cut(name, "/")
		parts = append(parts, fmt.Sprintf("%s IPv%s %d", protocol, family, n))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

func (r *report) writeJSON(file string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the report: %w", err)
	}
	if err := os.WriteFile(file, append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
