// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/weft-mesh/weft/internal/serve/prober"
	"github.com/weft-mesh/weft/test/proberlab"
)

const (
	// A probe that had no answer where one was expected is tried once more with
	// patience, to tell a slow machine from a closed door.
	patientTimeout = time.Second
	patientTries   = 3
	progressEvery  = 20 // cases
)

// runner runs test cases.
type runner struct {
	lab    *proberlab.Lab
	opts   options
	cases  []*generator.TestCase
	report *report
}

// newRunner starts the lab; its first pod's address goes into the cases that
// are about IP blocks, as with cyclonus itself.
func newRunner(ctx context.Context, l *proberlab.Lab, o options) (*runner, error) {
	if err := l.Up(ctx, o.lab, newCluster().objects(l.Container)); err != nil {
		return nil, err
	}
	ip, err := l.Address("z/c", 4)
	if err != nil {
		return nil, err
	}
	r := &runner{lab: l, opts: o, report: newReport(o)}
	for _, c := range generator.NewTestCaseGenerator(true, ip.String(), namespaces, nil, nil).GenerateAllTestCases() {
		if o.cases.MatchString(c.Description) && (o.limit == 0 || len(r.cases) < o.limit) {
			r.cases = append(r.cases, c)
		}
	}
	return r, nil
}

// all runs the cases one after the other, each from a grid without policies.
func (r *runner) all(ctx context.Context) error {
	began := time.Now()
	defer func() { r.report.Seconds = time.Since(began).Seconds() }()
	for i, tc := range r.cases {
		c, before := newCluster(), len(r.report.Mismatches)
		for n, step := range tc.Steps {
			if err := r.step(ctx, c, tc, n, step); err != nil {
				return fmt.Errorf("case %d (%s), step %d: %w", i+1, tc.Description, n+1, err)
			}
		}
		r.report.Cases++
		if len(r.report.Mismatches) > before {
			r.report.FailedCases++
		}
		if (i+1)%progressEvery == 0 || i+1 == len(r.cases) {
			fmt.Fprintf(os.Stderr, "%6.1fs  %d of %d cases, %d probes, %d mismatches\n",
				time.Since(began).Seconds(), i+1, len(r.cases), r.report.Probes, len(r.report.Mismatches))
		}
	}
	return nil
}

// step changes the cluster and compares who reaches whom.
func (r *runner) step(ctx context.Context, c *cluster, tc *generator.TestCase, n int, step *generator.TestStep) error {
	for _, a := range step.Actions {
		if err := c.perform(a); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := r.lab.Sync(ctx, c.objects(r.lab.Container)); err != nil {
		return err
	}
	r.report.Applying += time.Since(began).Seconds()
	r.report.Steps++
	var todo []*check
	for _, family := range r.opts.families {
		checks, err := r.checks(c, step.Probe, family)
		if err != nil {
			return err
		}
		todo = append(todo, checks...)
	}
	if err := r.probe(ctx, todo, r.opts.timeout, r.opts.tries, func(k *check, v prober.Verdict) { k.got = v }); err != nil {
		return err
	}
	if err := r.again(ctx, todo); err != nil {
		return err
	}
	for _, k := range todo {
		r.report.count(k, tc.Description, n+1, c.policies)
	}
	return r.hold(ctx)
}

// hold waits for the end of ctx if it is wished for and something is wrong.
func (r *runner) hold(ctx context.Context) error {
	if !r.opts.hold || len(r.report.Mismatches) == 0 {
		return nil
	}
	if err := r.report.print(os.Stderr, r.opts.print); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "the lab stays until you interrupt; commands for it:\n  export", strings.Join(r.lab.Env(), " "))
	<-ctx.Done()
	return ctx.Err()
}

// again looks a second time at what was not as expected.
func (r *runner) again(ctx context.Context, todo []*check) error {
	wrong := slices.DeleteFunc(slices.Clone(todo), (*check).good)
	return r.probe(ctx, wrong, patientTimeout, patientTries, func(k *check, v prober.Verdict) { k.later = &v })
}

// check is one probe and what should come of it.
type check struct {
	job    prober.Job
	from   string // NAMESPACE/NAME
	to     string
	family int
	want   bool
	why    string // of want
	self   bool   // a pod and its own address, which no policy concerns
	got    prober.Verdict
	later  *prober.Verdict // the second look; nil if there was no need
}

// good tells whether a probe ended as it should. A refusal is never good: a
// policy drops.
func (k *check) good() bool {
	if k.want {
		return k.got.Outcome == prober.Reached && k.got.Answer == k.to
	}
	return k.got.Outcome == prober.NoAnswer
}

// slow tells whether what should have been reached was, on the second look.
func (k *check) slow() bool {
	return !k.good() && k.want && k.got.Outcome == prober.NoAnswer && k.later != nil && k.later.Outcome == prober.Reached && k.later.Answer == k.to
}

// checks asks cyclonus which probes the step wants and what should come of them.
func (r *runner) checks(c *cluster, cfg *generator.ProbeConfig, family int) ([]*check, error) {
	if err := c.locate(r.lab, family); err != nil {
		return nil, err
	}
	byIP := *cfg
	byIP.Mode = generator.ProbeModePodIP // there is no need of services to test policies
	jobs := (&probe.JobBuilder{}).GetJobsForProbeConfig(c.resources, &byIP)
	r.report.Impossible += len(jobs.BadNamedPort) + len(jobs.BadPortProtocol)
	policies := matcher.BuildNetworkPolicies(false, c.policies)
	var todo []*check
	for _, j := range jobs.Valid {
		if !slices.Contains(r.opts.protocols, string(j.Protocol)) {
			r.report.Skipped++
			continue
		}
		ip, err := netip.ParseAddr(j.ToIP)
		if err != nil {
			return nil, fmt.Errorf("address of %s: %w", j.ToKey, err)
		}
		k := &check{
			job:  prober.Job{Protocol: string(j.Protocol), To: netip.AddrPortFrom(ip, uint16(j.ResolvedPort))},
			from: j.FromKey, to: j.ToKey, family: family, self: j.FromKey == j.ToKey,
		}
		k.want, k.why = expect(policies, j)
		if k.self {
			// Kubernetes: "a pod cannot block access to itself".
			k.want, k.why = true, "a pod always reaches itself"
		}
		todo = append(todo, k)
	}
	return todo, nil
}

func expect(policies *matcher.Policy, j *probe.Job) (bool, string) {
	allowed := policies.IsTrafficAllowed(j.Traffic())
	if allowed.IsAllowed() {
		return true, "allowed"
	}
	var why []string
	for direction, d := range map[string]*matcher.DirectionResult{"egress": allowed.Egress, "ingress": allowed.Ingress} {
		if d.IsAllowed() {
			continue
		}
		for _, t := range d.DenyingTargets {
			for _, p := range t.SourceRules {
				why = append(why, fmt.Sprintf("%s denied by %s/%s", direction, p.Namespace, p.Name))
			}
		}
	}
	slices.Sort(why)
	return false, strings.Join(slices.Compact(why), ", ")
}

func (r *runner) probe(ctx context.Context, todo []*check, timeout time.Duration, tries int, each func(*check, prober.Verdict)) error {
	if len(todo) == 0 {
		return nil
	}
	began := time.Now()
	defer func() { r.report.Probing += time.Since(began).Seconds() }()
	jobs, order := map[string][]prober.Job{}, map[string][]*check{}
	for _, k := range todo {
		jobs[k.from] = append(jobs[k.from], k.job)
		order[k.from] = append(order[k.from], k)
	}
	verdicts, err := r.lab.Probe(ctx, jobs, timeout, tries)
	if err != nil {
		return err
	}
	for pod, list := range verdicts {
		for i, v := range list {
			each(order[pod][i], v)
		}
	}
	return nil
}

func policyNames(policies []*networkingv1.NetworkPolicy) []string {
	names := make([]string, len(policies))
	for i, p := range policies {
		names[i] = p.Namespace + "/" + p.Name
	}
	return names
}
