// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/layout"
)

// waitTime is how long scripts wait for what must come.
const waitTime = 20 * time.Second

// Between two looks are at first minPoll, and never more than maxPoll.
const (
	minPoll = 20 * time.Millisecond
	maxPoll = 300 * time.Millisecond
)

// commands are what scripts can do besides testscript's own:
//
//	weft ARG...                weft
//	lab ARG...                 weft lab
//	node NODE CMD...           CMD on a node, or in the world "outside"
//	pod NS/POD CMD...          CMD in a pod
//	until REGEX CMD...         any of the above, or exec, again and again until it
//	                           succeeds and its output matches
//	address VAR NS/POD         sets ${VAR}4 and ${VAR}6, also of nodes
//	reach FILE                 who reaches whom; see reach_test.go
//	flow NODE FIELD=VALUE...   waits for such a flow; ! flow: there is none
//	kill-daemon                SIGKILL for the lab's daemon
//	drops NODE [REASON...]     the reasons for which the node's agent has dropped
//	                           packets are these, each REASON or REASON=PACKETS
func commands() map[string]func(*testscript.TestScript, bool, []string) {
	m := map[string]func(*testscript.TestScript, bool, []string){
		"until":   until,
		"address": address,
		"reach":   reach,
		"flow":    flow,
		"drops":   drops,

		"kill-daemon": killDaemon,
	}
	for name := range prefixes {
		m[name] = func(ts *testscript.TestScript, neg bool, args []string) {
			argv := expand(ts, name, args)
			check(ts, neg, ts.Exec(argv[0], argv[1:]...))
		}
	}
	return m
}

// prefixes are commands that stand for the beginning of a longer one.
var prefixes = map[string]func(args []string) []string{
	"weft": func(args []string) []string { return append([]string{"weft"}, args...) },
	"lab":  func(args []string) []string { return append([]string{"weft", "lab"}, args...) },
	"node": func(args []string) []string {
		return append([]string{"weft", "lab", "node", "exec", args[0], "--"}, args[1:]...)
	},
	"pod": func(args []string) []string {
		return append([]string{"weft", "lab", "exec", args[0], "--"}, args[1:]...)
	},
}

func expand(ts *testscript.TestScript, name string, args []string) []string {
	if len(args) == 0 {
		ts.Fatalf("usage: %s ARG...", name)
	}
	if name == "exec" {
		return args
	}
	return prefixes[name](args)
}

// await looks again and again until look has nothing to complain about.
func await(ts *testscript.TestScript, look func() error) {
	deadline := time.Now().Add(waitTime)
	for poll := minPoll; ; poll = min(poll*3/2, maxPoll) {
		err := look()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("after %v still: %v", waitTime, err)
		}
		time.Sleep(poll)
	}
}

func until(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 || args[1] != "exec" && prefixes[args[1]] == nil {
		ts.Fatalf("usage: until REGEX weft|lab|node|pod|exec ARG...")
	}
	want, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	argv := expand(ts, args[1], args[2:])
	var out string
	await(ts, func() (err error) {
		if out, err = quietly(ts, argv); err != nil {
			return err
		}
		if !want.MatchString(out) {
			return fmt.Errorf("the output does not match %s:\n%s", want, out)
		}
		return nil
	})
	_, err = io.WriteString(ts.Stdout(), out)
	ts.Check(err)
}

// quietly runs a command without a word in the log of the script: most of its
// runs are of no interest.
func quietly(ts *testscript.TestScript, argv []string) (string, error) {
	if argv[0] == "weft" {
		return labOf(ts).Weft(ctxOf(ts), argv[1:]...)
	}
	cmd := exec.CommandContext(ctxOf(ts), argv[0], argv[1:]...)
	cmd.Dir = ts.MkAbs(".")
	cmd.Env = append(append(os.Environ(), labOf(ts).Env()...), "PATH="+ts.Getenv("PATH"))
	out, err := cmd.Output()
	return string(out), err
}

// labStatus asks the script's lab.
func labStatus(ts *testscript.TestScript) *api.Status {
	st, err := labOf(ts).Status(ctxOf(ts))
	ts.Check(err)
	return st
}

// ipsOf returns the addresses of a pod, NS/POD, or of a node.
func ipsOf(st *api.Status, name string) ([]string, error) {
	if name == "outside" {
		return []string{"172.30.0.254", "fd00:172:30::fe"}, nil
	}
	for _, n := range st.Nodes {
		if n.Name == name {
			return n.IPs, nil
		}
	}
	for _, p := range st.Pods {
		if p.Namespace+"/"+p.Name == name {
			return p.IPs, nil
		}
	}
	return nil, fmt.Errorf("the lab has no pod or node %s", name)
}

func address(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: address VAR NS/POD|NODE")
	}
	ips, err := ipsOf(labStatus(ts), args[1])
	ts.Check(err)
	for _, ip := range ips {
		family := "4"
		if strings.Contains(ip, ":") {
			family = "6"
		}
		ts.Setenv(args[0]+family, ip)
	}
}

func drops(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: drops NODE [REASON[=PACKETS]...]")
	}
	st, err := labOf(ts).Agent(ctxOf(ts), args[0])
	ts.Check(err)
	want := args[1:]
	for _, d := range st.Drops {
		i := slices.IndexFunc(want, func(w string) bool { return w == d.Name || w == fmt.Sprintf("%s=%d", d.Name, d.Packets) })
		if i < 0 {
			ts.Fatalf("%s has dropped %d packets: %s", args[0], d.Packets, d.Name)
		}
		want = slices.Delete(slices.Clone(want), i, i+1)
	}
	if len(want) > 0 {
		ts.Check(errors.New(args[0] + " has not dropped anything for " + strings.Join(want, ", ")))
	}
}

func killDaemon(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) > 0 {
		ts.Fatalf("usage: kill-daemon")
	}
	lay, err := layout.New(labOf(ts).Name)
	ts.Check(err)
	pids, err := os.ReadFile(filepath.Join(lay.DaemonCgroup(), "cgroup.procs"))
	ts.Check(err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(pids)))
	ts.Check(err)
	ts.Check(syscall.Kill(pid, syscall.SIGKILL))
	await(ts, func() error { // its socket answers, or resets, until it has gone
		left, err := os.ReadFile(filepath.Join(lay.DaemonCgroup(), "cgroup.procs"))
		if err == nil && len(left) > 0 {
			return fmt.Errorf("the daemon is still there: %s", left)
		}
		return err
	})
}
