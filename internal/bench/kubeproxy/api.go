// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/weft-mesh/weft/internal/netdev"
)

// Object is one object as etcd holds it.
type Object struct {
	// Key is its path in etcd, such as /registry/services/specs/NS/NAME.
	Key string
	// JSON is the object whole: with apiVersion, kind, uid, creationTimestamp
	// and every field that the API server defaults.
	JSON []byte
}

// nodeObject is the Node that kube-proxy waits for.
func nodeObject(address netip.Addr) Object {
	b, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": nodeName, "uid": "00000000-0000-0000-0000-000000000001", "creationTimestamp": "2020-01-01T00:00:00Z"},
		"status":   map[string]any{"addresses": []any{map[string]any{"type": "InternalIP", "address": address.String()}}},
	})
	if err != nil {
		panic(err) // strings only
	}
	return Object{Key: "/registry/minions/" + nodeName, JSON: b}
}

// api talks to what listens in the node's network namespace.
type api struct{ client *http.Client }

func newAPI(netns string) *api {
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = netdev.InNetNS(netns, func() (err error) {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
	return &api{client: &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: dial, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // signed by the server itself, in our namespace
	}}}
}

// get takes a body for read; nil drops it.
func (a *api) get(ctx context.Context, url string, read func(io.Reader) error) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	return a.do(r, read)
}

func (a *api) do(r *http.Request, read func(io.Reader) error) error {
	r.Header.Set("Authorization", "Bearer "+token)
	answer, err := a.client.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode >= 300 {
		text, _ := io.ReadAll(io.LimitReader(answer.Body, 500))
		return fmt.Errorf("%s %s: %s: %s", r.Method, r.URL, answer.Status, bytes.TrimSpace(text))
	}
	if read != nil {
		return read(answer.Body)
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// transaction is etcd's limit of operations in one.
const transaction = 128

// store writes objects to etcd by its gateway for JSON.
func (a *api) store(ctx context.Context, objects []Object) error {
	type put struct {
		Key   []byte `json:"key"`
		Value []byte `json:"value"`
	}
	type operation struct {
		Put put `json:"requestPut"`
	}
	for len(objects) > 0 {
		n := min(transaction, len(objects))
		var operations []operation
		for _, o := range objects[:n] {
			operations = append(operations, operation{put{[]byte(o.Key), o.JSON}})
		}
		objects = objects[n:]
		body, err := json.Marshal(map[string]any{"success": operations})
		if err != nil {
			return err
		}
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+etcdAddress+"/v3/kv/txn", bytes.NewReader(body))
		if err != nil {
			return err
		}
		if err := a.do(r, nil); err != nil {
			return err
		}
	}
	return nil
}

// Patch changes an object through the API by a merge patch. The path is such
// as /apis/discovery.k8s.io/v1/namespaces/NS/endpointslices/NAME.
func (c *Cluster) Patch(ctx context.Context, path string, patch []byte) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPatch, "https://"+apiAddress+path, bytes.NewReader(patch))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/merge-patch+json")
	return c.api.do(r, nil)
}

// SyncSeconds is how long kube-proxy has spent on writing rules since its start,
// as its metrics say. It waits for the first time to be counted: rules are in
// force shortly before.
func (c *Cluster) SyncSeconds(ctx context.Context) (seconds float64, err error) {
	err = c.proxy.until(ctx, func() error {
		return c.api.get(ctx, "http://"+metricsAddress+"/metrics", func(body io.Reader) (err error) {
			var count float64
			if seconds, count, err = sumSyncs(body); err == nil && count == 0 {
				err = errors.New("nothing is counted in kubeproxy_sync_proxy_rules_duration_seconds")
			}
			return err
		})
	})
	return seconds, err
}

// sumSyncs adds up the IP families.

func sumSyncs(metrics io.Reader) (seconds, count float64, err error) {
	const name = "kubeproxy_sync_proxy_rules_duration_seconds_"
	lines := bufio.NewScanner(metrics)
	for lines.Scan() {
		what, ok := strings.CutPrefix(lines.Text(), name)
		if !ok {
			continue
		}
		at := strings.LastIndexByte(what, ' ') + 1
		v, err := strconv.ParseFloat(what[at:], 64)
		if err != nil {
			return 0, 0, fmt.Errorf("metric %s: %w", lines.Text(), err)
		}
		switch {
		case strings.HasPrefix(what, "sum"):
			seconds += v
		case strings.HasPrefix(what, "count"):
			count += v
		}
	}
	return seconds, count, lines.Err()
}
