// SPDX-License-Identifier: Apache-2.0

// Package scenario runs weft as its users do: labs of real agents and pods, by
// the command line. A scenario is a text in testdata: what to do, and the tables
// that must come of it.
package scenario

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/weft-mesh/weft/test/testlab"
)

func TestMain(m *testing.M) { os.Exit(testlab.Main(m)) }

// tidyTime is left of the test's time to take labs down.
const tidyTime = 30 * time.Second

func TestScenarios(t *testing.T) {
	testlab.Need(t)
	repo, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	p := testscript.Params{
		Dir:                "testdata",
		Cmds:               commands(),
		RequireUniqueNames: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("REPO", repo)
			env.Setenv("MESH", filepath.Join(repo, "test/scenario/testdata/cluster"))
			return setup(env)
		},
	}
	if deadline, ok := t.Deadline(); ok {
		p.Deadline = deadline.Add(-tidyTime)
	}
	testscript.Run(t, p)
}

// labKey is where a script's lab is among its values.
type labKey struct{}

// setup gives a script its lab, which is removed however the script ends.
func setup(env *testscript.Env) error {
	l, err := testlab.Make()
	if err != nil {
		return err
	}
	env.Vars = append(env.Vars, l.Env()...)
	env.Setenv("LAB", l.Dir())
	env.Values[labKey{}] = l
	ctx, cancel := context.WithCancel(context.Background())
	env.Values[ctxKey{}] = ctx
	env.Defer(func() {
		cancel()
		if t, ok := env.T().(interface{ Failed() bool }); ok && t.Failed() {
			env.T().Log(l.Logs())
		}
		if err := l.Remove(); err != nil {
			env.T().Log(err)
			env.T().FailNow()
		}
	})
	return nil
}

// labOf returns the script's lab.
func labOf(ts *testscript.TestScript) *testlab.Lab {
	l, ok := ts.Value(labKey{}).(*testlab.Lab)
	if !ok {
		ts.Fatalf("the script has no lab")
	}
	return l
}

// ctxKey is where the context of a script's own commands is; it ends with the
// script.
type ctxKey struct{}

func ctxOf(ts *testscript.TestScript) context.Context {
	ctx, ok := ts.Value(ctxKey{}).(context.Context)
	if !ok {
		ts.Fatalf("the script has no context")
	}
	return ctx
}

// check ends a script whose command failed without being meant to, or the other
// way round.
func check(ts *testscript.TestScript, neg bool, err error) {
	switch {
	case err != nil && !neg:
		ts.Fatalf("%v", err)
	case err == nil && neg:
		ts.Fatalf("it succeeded, and must not")
	}
}
