// SPDX-License-Identifier: Apache-2.0

// Package probe asks a container how it is, the way a kubelet does: from the
// network namespace of its node.
package probe

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/weft-mesh/weft/internal/lab/shim"
	"github.com/weft-mesh/weft/internal/netdev"
)

// eager is how often a container is asked before its first good answer, however
// long its period is: a lab's user is waiting.
const eager = 200 * time.Millisecond

// Target is the container that is asked.
type Target struct {
	Weft      string // executable
	NodeNetNS string // file
	IP        string // of the pod
	Container *corev1.Container
	// Inside runs a command in the container, but for its Argv.
	Inside func() shim.Spec
}

// Watch asks until ctx ends, and reports each change of the answer: after
// successThreshold good or failureThreshold bad ones in a row. The answer is bad
// to begin with; that is not reported.
func Watch(ctx context.Context, p *corev1.Probe, t Target, report func(ok bool, why string)) {
	period := seconds(p.PeriodSeconds, 10)
	if !sleep(ctx, time.Duration(p.InitialDelaySeconds)*time.Second) {
		return
	}
	ok, good, bad := false, int32(0), int32(0)
	lastWhy := ""
	for ctx.Err() == nil {
		err := Once(ctx, p, t)
		if ctx.Err() != nil {
			return
		}
		wait, why := period, ""
		if err == nil {
			good, bad = good+1, 0
		} else {
			good, bad, why = 0, bad+1, err.Error()
		}
		switch {
		case !ok && good >= max(p.SuccessThreshold, 1):
			ok = true
			report(true, "")
		case ok && bad >= threshold(p), !ok && err != nil && why != lastWhy:
			ok = false
			report(false, why)
		}
		lastWhy = why
		if !ok {
			wait = min(period, eager)
		}
		if !sleep(ctx, wait) {
			return
		}
	}
}

// Failing asks until ctx ends or failureThreshold bad answers came in a row,
// whose last reason it then returns: a liveness probe.
func Failing(ctx context.Context, p *corev1.Probe, t Target) (why string) {
	if !sleep(ctx, time.Duration(p.InitialDelaySeconds)*time.Second) {
		return ""
	}
	bad := int32(0)
	for sleep(ctx, seconds(p.PeriodSeconds, 10)) {
		err := Once(ctx, p, t)
		if err == nil || ctx.Err() != nil {
			bad = 0
			continue
		}
		if bad++; bad >= threshold(p) {
			return err.Error()
		}
	}
	return ""
}

func threshold(p *corev1.Probe) int32 {
	if p.FailureThreshold > 0 {
		return p.FailureThreshold
	}
	return 3
}

func seconds(n int32, otherwise int32) time.Duration {
	if n <= 0 {
		n = otherwise
	}
	return time.Duration(n) * time.Second
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// Once asks once; the error is the bad answer.
func Once(ctx context.Context, p *corev1.Probe, t Target) error {
	ctx, cancel := context.WithTimeout(ctx, seconds(p.TimeoutSeconds, 1))
	defer cancel()
	switch {
	case p.HTTPGet != nil:
		return httpGet(ctx, p.HTTPGet, t)
	case p.TCPSocket != nil:
		return tcpSocket(ctx, p.TCPSocket, t)
	case p.Exec != nil:
		return run(ctx, p.Exec, t)
	}
	return errors.New("probe without httpGet, tcpSocket or exec")
}

// dialer makes its sockets in the node's network namespace.
func (t Target) dialer() func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		// An address that is a number is dialled by the calling thread itself.
		inErr := netdev.InNetNS(t.NodeNetNS, func() error {
			var d net.Dialer
			conn, err = d.DialContext(ctx, network, address)
			return nil
		})
		if inErr != nil {
			return nil, inErr
		}
		return conn, err
	}
}

func (t Target) address(host string, port intstr.IntOrString) (string, error) {
	if host == "" {
		host = t.IP
	}
	if net.ParseIP(host) == nil {
		return "", fmt.Errorf("probe host %q: want an address", host)
	}
	number := port.IntValue()
	if port.Type == intstr.String {
		for _, cp := range t.Container.Ports {
			if cp.Name == port.StrVal {
				number = int(cp.ContainerPort)
			}
		}
	}
	if number < 1 || number > 65535 {
		return "", fmt.Errorf("probe port %q: want a number or the name of a port of the container", port.String())
	}
	return net.JoinHostPort(host, strconv.Itoa(number)), nil
}

func tcpSocket(ctx context.Context, a *corev1.TCPSocketAction, t Target) error {
	address, err := t.address(a.Host, a.Port)
	if err != nil {
		return err
	}
	conn, err := t.dialer()(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	return conn.Close()
}

func httpGet(ctx context.Context, a *corev1.HTTPGetAction, t Target) error {
	address, err := t.address(a.Host, a.Port)
	if err != nil {
		return err
	}
	url := strings.ToLower(string(a.Scheme)) + "://" + address + "/" + strings.TrimPrefix(a.Path, "/")
	if a.Scheme == "" {
		url = "http" + url
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	for _, h := range a.HTTPHeaders {
		if strings.EqualFold(h.Name, "Host") {
			req.Host = h.Value
		}
		req.Header.Add(h.Name, h.Value)
	}
	tr := &http.Transport{DialContext: t.dialer(), DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	client := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, io.LimitReader(resp.Body, 10<<10))
	if resp.StatusCode < 200 || resp.StatusCode >= 400 {
		return fmt.Errorf("probe: GET %s: %s", url, resp.Status)
	}
	return nil
}

func run(ctx context.Context, a *corev1.ExecAction, t Target) error {
	if err := Exec(ctx, a, t); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	return nil
}

// Exec runs a command in the container; a bad exit code is an error.
func Exec(ctx context.Context, a *corev1.ExecAction, t Target) error {
	spec := t.Inside()
	spec.Argv = a.Command
	args, err := shim.Command(spec)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, t.Weft, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		text := strings.TrimSpace(out.String())
		return fmt.Errorf("%s: %w: %s", strings.Join(a.Command, " "), err, text[:min(len(text), 500)])
	}
	return nil
}
