// SPDX-License-Identifier: Apache-2.0

// Command testsummary reads `go test -json` and prints a line for each package,
// the whole output of what failed, and the totals. It exits 1 when a test or a
// package failed, and, with CI set, when a test was skipped.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// event is a line of `go test -json` (see go doc test2json).
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Output      string
	Elapsed     float64 // seconds
	FailedBuild string
}

// summary gathers the events of one run.
type summary struct {
	out                     io.Writer
	output                  map[string][]string // by package + " " + test
	passed, failed, skipped []string
	packages                map[string]string // to its last action
}

func newSummary(out io.Writer) *summary {
	return &summary{out: out, output: map[string][]string{}, packages: map[string]string{}}
}

func main() {
	s := newSummary(os.Stdout)
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testsummary:", err)
		os.Exit(1)
	}
	os.Exit(s.totals(os.Getenv("CI") != ""))
}

func (s *summary) read(r io.Reader) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Fprintln(s.out, lines.Text()) // not of test2json, such as a tool's own message
			continue
		}
		s.add(e)
	}
	return lines.Err()
}

func (s *summary) add(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output":
		s.output[key] = append(s.output[key], e.Output)
	case "build-output":
		fmt.Fprint(s.out, e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
		} else {
			s.endTest(e, key)
		}
	}
}

func (s *summary) endTest(e event, key string) {
	switch e.Action {
	case "pass":
		s.passed = append(s.passed, key)
	case "fail":
		s.failed = append(s.failed, key)
		fmt.Fprint(s.out, strings.Join(s.output[key], ""))
	case "skip":
		s.skipped = append(s.skipped, key)
		fmt.Fprint(s.out, strings.Join(s.output[key], ""))
	}
	delete(s.output, key)
}

func (s *summary) endPackage(e event) {
	s.packages[e.Package] = e.Action
	if e.Action == "fail" {
		s.flush(e.Package)
	}
	word := map[string]string{"pass": "ok", "fail": "FAIL", "skip": "?"}[e.Action]
	note := ""
	if e.Action == "skip" {
		note = "\t[no test files]"
	}
	fmt.Fprintf(s.out, "%s\t%s\t%.3fs%s\n", word, e.Package, e.Elapsed, note)
}

// flush prints what a failed package wrote outside its tests, and the output
// of tests that never ended (a panic, a timeout).
func (s *summary) flush(pkg string) {
	var keys []string
	for key := range s.output {
		if strings.HasPrefix(key, pkg+" ") {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		fmt.Fprint(s.out, strings.Join(s.output[key], ""))
		delete(s.output, key)
	}
}

func (s *summary) totals(ci bool) int {
	failedPackages := 0
	for _, action := range s.packages {
		if action == "fail" {
			failedPackages++
		}
	}
	for _, name := range s.failed {
		fmt.Fprintln(s.out, "--- FAIL:", name)
	}
	fmt.Fprintf(s.out, "tests: %d passed, %d failed, %d skipped; packages: %d, %d failed\n",
		len(s.passed), len(s.failed), len(s.skipped), len(s.packages), failedPackages)
	switch {
	case len(s.failed) > 0 || failedPackages > 0 || len(s.packages) == 0:
		return 1
	case ci && len(s.skipped) > 0:
		fmt.Fprintln(s.out, "tests: skipping is failing here, since CI is set")
		return 1
	}
	return 0
}
