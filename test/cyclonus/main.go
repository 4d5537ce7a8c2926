// SPDX-License-Identifier: Apache-2.0

// Command cyclonus runs all test cases that cyclonus generates against real pods
// in a lab: a grid of three namespaces with three pods each, in which after
// every step every pod tries to reach every pod on every port. What should
// happen is what cyclonus' matcher says. It ends with exit code 1 on any
// difference.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/weft-mesh/weft/test/proberlab"
)

// options are the flags.
type options struct {
	lab       proberlab.Options
	families  []int
	protocols []string
	cases     *regexp.Regexp
	limit     int
	timeout   time.Duration
	tries     int
	print     int
	json      string
	hold      bool
}

var errMismatch = errors.New("some probes ended otherwise than cyclonus expects")

func main() {
	logrus.SetOutput(io.Discard) // cyclonus'
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "cyclonus:", err)
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	o := options{lab: proberlab.Options{Prefix: "cyc"}}
	var families, protocols, cases string
	f := flag.NewFlagSet("cyclonus", flag.ContinueOnError)
	f.IntVar(&o.lab.Nodes, "nodes", 2, "number of nodes")
	f.StringVar(&o.lab.Tunnel, "tunnel", "none", "none or vxlan")
	f.StringVar(&families, "families", "4,6", "address families to probe")
	f.StringVar(&protocols, "protocols", "TCP,UDP,SCTP", "protocols to probe")
	f.StringVar(&cases, "cases", "", "run only cases whose description matches this regular expression")
	f.IntVar(&o.limit, "limit", 0, "run only that many cases; 0 is all")
	f.DurationVar(&o.timeout, "timeout", 300*time.Millisecond, "time for an answer to one try")
	f.IntVar(&o.tries, "tries", 2, "tries before a probe counts as unanswered")
	f.IntVar(&o.print, "print", 40, "how many mismatches to print")
	f.BoolVar(&o.hold, "hold", false, "at the first mismatch, wait for an interrupt, to look at the lab")
	f.StringVar(&o.json, "json", "", "write the report as JSON to this file")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	for _, s := range strings.Split(families, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || (n != 4 && n != 6) {
			return o, fmt.Errorf("families %q: want 4, 6 or 4,6", families)
		}
		o.families = append(o.families, n)
	}
	o.protocols = strings.Split(protocols, ",")
	var err error
	if o.cases, err = regexp.Compile(cases); err != nil {
		return o, fmt.Errorf("cases: %w", err)
	}
	return o, nil
}

func run(ctx context.Context, args []string) (err error) {
	o, err := parse(args)
	if err != nil {
		return err
	}
	l, err := proberlab.New(ctx, o.lab)
	if err != nil {
		return err
	}
	defer func() {
		if down := l.Down(); down != nil {
			err = errors.Join(err, fmt.Errorf("remove the lab: %w", down))
		}
	}()
	r, err := newRunner(ctx, l, o)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, l.Logs())
	}
	if err := r.all(ctx); err != nil {
		return errors.Join(err, r.report.print(os.Stdout, o.print))
	}
	if err := r.report.print(os.Stdout, o.print); err != nil {
		return err
	}
	if o.json != "" {
		if err := r.report.writeJSON(o.json); err != nil {
			return err
		}
	}
	if len(r.report.Mismatches) > 0 {
		return errMismatch
	}
	return nil
}
