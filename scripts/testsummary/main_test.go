// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	const (
		pass = `{"Action":"pass","Package":"p","Test":"TestA"}` + "\n" + `{"Action":"pass","Package":"p"}` + "\n"
		skip = `{"Action":"output","Package":"p","Test":"TestB","Output":"no root\n"}` + "\n" + `{"Action":"skip","Package":"p","Test":"TestB"}` + "\n"
		fail = `{"Action":"output","Package":"p","Test":"TestC","Output":"want 1\n"}` + "\n" +
			`{"Action":"fail","Package":"p","Test":"TestC"}` + "\n" + `{"Action":"fail","Package":"p"}` + "\n"
		crash = `{"Action":"output","Package":"p","Test":"TestD","Output":"panic: x\n"}` + "\n" + `{"Action":"fail","Package":"p"}` + "\n"
	)
	for _, c := range []struct {
		name, in string
		ci       bool
		code     int
		want     string
	}{
		{"all pass", pass, true, 0, "tests: 1 passed, 0 failed, 0 skipped; packages: 1, 0 failed"},
		{"a skip on a laptop", skip + pass, false, 0, "1 skipped"},
		{"a skip in CI", skip + pass, true, 1, "no root"},
		{"a failed test shows its output", pass + fail, false, 1, "want 1"},
		{"a failed test is named at the end", fail, false, 1, "--- FAIL: p TestC"},
		{"a crash without the end of a test", crash, false, 1, "panic: x"},
		{"no test at all", "", false, 1, "packages: 0"},
		{"what is not of test2json is passed on", "no such tool\n" + pass, false, 0, "no such tool"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			s := newSummary(&out)
			if err := s.read(strings.NewReader(c.in)); err != nil {
				t.Fatal(err)
			}
			if code := s.totals(c.ci); code != c.code || !strings.Contains(out.String(), c.want) {
				t.Errorf("exit code %d, want %d; output, with %q wanted:\n%s", code, c.code, c.want, out.String())
			}
		})
	}
}
