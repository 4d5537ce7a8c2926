// SPDX-License-Identifier: Apache-2.0

// Package proberlab is a lab in which every pod runs a prober: tests of policies
// say which objects there shall be, and ask which pods reach which.
package proberlab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/lab"
	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/daemon"
	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/serve/prober"
	"github.com/weft-mesh/weft/test/testlab"
)

const (
	applyTime = time.Minute      // for a change to be in force
	dialTime  = 10 * time.Second // for a prober to take orders
)

// Options of a lab.
type Options struct {
	Prefix string // of the lab's name: lower-case letters and digits, at most 6
	Nodes  int
	Tunnel string // none or vxlan
}

// Lab may be probed by several goroutines while another changes it.
type Lab struct {
	test    *testlab.Lab
	client  *lab.Client
	bin     string // folder of weft and weft-cni
	sockets string // folder of the probers' control sockets
	applied Objects

	mu      sync.Mutex
	pods    map[string]api.Pod        // protected by mu; immutable maps, by NAMESPACE/NAME
	probers map[string]*prober.Client // protected by mu; immutable maps
}

// New prepares a lab and builds weft; Up starts it, Down removes all of it.
func New(ctx context.Context, o Options) (l *Lab, err error) {
	root, err := os.MkdirTemp("", "weft-"+o.Prefix+"-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the lab: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(root))
		}
	}()
	l = &Lab{
		bin: filepath.Join(root, "bin"), sockets: filepath.Join(root, "sockets"),
		applied: Objects{}, probers: map[string]*prober.Client{},
	}
	for _, dir := range []string{l.bin, l.sockets, filepath.Join(root, "labs")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make a folder for the lab: %w", err)
		}
	}
	if err := build(ctx, l.bin); err != nil {
		return nil, err
	}
	l.test = &testlab.Lab{Name: o.Prefix + strings.ToLower(rand.Text()[:8]), Root: filepath.Join(root, "labs"), Bin: l.bin}
	// The daemon finds its folder in its environment.
	if err := os.Setenv(layout.EnvDir, l.test.Root); err != nil {
		return nil, fmt.Errorf("choose the folder of the lab: %w", err)
	}
	if l.client, err = lab.NewClient(l.test.Name); err != nil {
		return nil, err
	}
	return l, nil
}

// build makes the programs of the module that this one is tested with.
func build(ctx context.Context, dir string) error {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/weft-mesh/weft").Output()
	if err != nil {
		return fmt.Errorf("find the module of weft: %w", err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-C", strings.TrimSpace(string(out)), "-buildvcs=false", "-o", dir+"/", "./cmd/weft", "./cmd/weft-cni")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build weft: %w\n%s", err, text)
	}
	return nil
}

// Up starts the lab with these objects.
func (l *Lab) Up(ctx context.Context, o Options, objects Objects) error {
	cfg := daemon.Config{Name: l.test.Name, Weft: filepath.Join(l.bin, "weft"), Nodes: o.Nodes, Tunnel: o.Tunnel, MTU: 1500}
	file, err := objects.file()
	if err != nil {
		return err
	}
	if err := explain(l.client.Up(ctx, cfg, []api.File{file}, applyTime, func(string) {})); err != nil {
		return fmt.Errorf("start the lab: %w", err)
	}
	l.applied = objects.clone()
	return l.refresh(ctx)
}

// Down removes the lab and says what it left behind.
func (l *Lab) Down() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.probers {
		c.Close()
	}
	return errors.Join(l.test.Remove(), os.RemoveAll(filepath.Dir(l.sockets)))
}

// Env is what commands need to mean this lab.
func (l *Lab) Env() []string { return l.test.Env() }

// Logs is the end of every log of the lab.
func (l *Lab) Logs() string { return l.test.Logs() }

// Container is a container that runs a prober. Its name is that of the pod,
// NAMESPACE/NAME.
func (l *Lab) Container(pod string, tcp, udp, sctp []int) corev1.Container {
	args := []string{"serve", "prober", "--name", pod, "--control", l.control(pod)}
	for flag, ports := range map[string][]int{"--tcp": tcp, "--udp": udp, "--sctp": sctp} {
		for _, p := range ports {
			args = append(args, flag, fmt.Sprint(p))
		}
	}
	return corev1.Container{Name: "prober", Command: []string{filepath.Join(l.bin, "weft")}, Args: args}
}

func (l *Lab) control(pod string) string {
	return filepath.Join(l.sockets, strings.ReplaceAll(pod, "/", "_"))
}

// Sync makes the cluster have exactly these objects, and returns when that is in
// force on every node.
func (l *Lab) Sync(ctx context.Context, want Objects) error {
	gone, changed := l.applied.diff(want)
	if len(gone) > 0 {
		file, err := gone.file()
		if err != nil {
			return err
		}
		if err := explain(l.client.Delete(ctx, []api.File{file}, applyTime, func(string) {})); err != nil {
			return fmt.Errorf("delete objects: %w", err)
		}
	}
	if len(changed) > 0 {
		file, err := changed.file()
		if err != nil {
			return err
		}
		if err := explain(l.client.Apply(ctx, []api.File{file}, applyTime, func(string) {})); err != nil {
			return fmt.Errorf("apply objects: %w", err)
		}
	}
	l.applied = want.clone()
	if gone.has("Pod") || changed.has("Pod") {
		return l.refresh(ctx)
	}
	return nil
}

// explain says why an input was refused.
func explain(err error) error {
	var refused *lab.Refused
	if !errors.As(err, &refused) {
		return err
	}
	text := make([]string, len(refused.Errors))
	for i, e := range refused.Errors {
		text[i] = e.Field + ": " + e.Message
	}
	return fmt.Errorf("%w: %s", err, strings.Join(text, "; "))
}

// refresh finds the addresses of the pods and their probers.
func (l *Lab) refresh(ctx context.Context) error {
	st, err := l.client.Status(ctx)
	if err != nil {
		return err
	}
	pods := map[string]api.Pod{}
	for _, p := range st.Pods {
		if !p.Terminating {
			pods[p.Namespace+"/"+p.Name] = p
		}
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	probers := map[string]*prober.Client{}
	var errs []error
	for name, p := range pods {
		if c := l.prober(name); c != nil && l.Pods()[name].ContainerID == p.ContainerID {
			probers[name] = c
			continue
		}
		c, err := prober.Dial(ctx, l.control(name))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		probers[name] = c
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, c := range l.probers {
		if probers[name] != c {
			c.Close()
		}
	}
	l.pods, l.probers = pods, probers
	return errors.Join(errs...)
}

func (l *Lab) prober(pod string) *prober.Client {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.probers[pod]
}

// Pods returns the pods of the lab by NAMESPACE/NAME.
func (l *Lab) Pods() map[string]api.Pod {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pods
}

// Address is the address of a pod in a family, 4 or 6.
func (l *Lab) Address(pod string, family int) (netip.Addr, error) {
	for _, text := range l.Pods()[pod].IPs {
		if ip, err := netip.ParseAddr(text); err == nil && ip.Is4() == (family == 4) {
			return ip, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("pod %s has no IPv%d address", pod, family)
}

// Probe has every pod do its jobs, all at the same time. The verdicts are in the
// order of the jobs.
func (l *Lab) Probe(ctx context.Context, jobs map[string][]prober.Job, timeout time.Duration, tries int) (map[string][]prober.Verdict, error) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	verdicts, errs := map[string][]prober.Verdict{}, []error(nil)
	for pod, list := range jobs {
		c := l.prober(pod)
		if c == nil {
			return nil, fmt.Errorf("pod %s has no prober", pod)
		}
		wg.Go(func() {
			v, err := c.Do(ctx, prober.Batch{Jobs: list, Timeout: timeout, Tries: tries})
			mu.Lock()
			defer mu.Unlock()
			verdicts[pod] = v
			if err != nil {
				errs = append(errs, fmt.Errorf("pod %s: %w", pod, err))
			}
		})
	}
	wg.Wait()
	return verdicts, errors.Join(errs...)
}
