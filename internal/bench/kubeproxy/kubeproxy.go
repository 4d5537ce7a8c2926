// SPDX-License-Identifier: Apache-2.0

// Package kubeproxy runs what weft's services are measured beside: a real
// kube-proxy in a network namespace, fed by a real API server and etcd there.
// The binaries come from test/kubeproxy/build.sh.
package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/weft-mesh/weft/internal/netdev"
)

// Mode is how kube-proxy programs the kernel.
type Mode string

// The modes, named as kube-proxy names them.
const (
	IPTables Mode = "iptables" // with the legacy binaries: those over nftables take far longer
	NFTables Mode = "nftables"
)

// Where everything listens, in the node's network namespace.
const (
	etcdAddress    = "127.0.0.1:2379"
	apiAddress     = "127.0.0.1:6443"
	metricsAddress = "127.0.0.1:10249"
)

const (
	// nodeName is the Node that kube-proxy runs on.
	nodeName = "node1"
	// token opens the API server, which listens in the node's namespace alone.
	token = "bench"
	// patience bounds the start of each component.
	patience = time.Minute
)

// Config is a node to run on.
type Config struct {
	// Binaries is a folder with etcd, kube-apiserver and kube-proxy.
	Binaries string
	// NetNS is the file of the node's network namespace, with lo up.
	NetNS string
	// Node is an address of the node; not of lo.
	Node netip.Addr
	// PodCIDR holds the clients; kube-proxy masquerades what comes from elsewhere.
	PodCIDR netip.Prefix
	// Folder is for data, configuration and logs; Close empties it.
	Folder string
	// Cgroup is a cgroup2 folder for the processes.
	Cgroup string
}

// Check says what is missing in the folder of binaries, or on the machine.
func Check(binaries string) error {
	for _, name := range []string{"etcd", "kube-apiserver", "kube-proxy"} {
		if _, err := os.Stat(filepath.Join(binaries, name)); err != nil {
			return fmt.Errorf("binary of %s (test/kubeproxy/build.sh makes it): %w", name, err)
		}
	}
	for _, name := range []string{legacyBinary, "nft", "conntrack"} {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("kube-proxy's tools: %w", err)
		}
	}
	return nil
}

// Cluster is a running etcd and API server.
type Cluster struct {
	config   Config
	folder   string // as in config
	api      *api
	etcd     *process
	server   *process
	proxy    *process
	legacies string // folder of symbolic links to the legacy iptables
}

// Start runs etcd with the objects in it, then the API server. Close it.
func Start(ctx context.Context, config Config, objects []Object) (_ *Cluster, err error) {
	c := &Cluster{config: config, folder: config.Folder, api: newAPI(config.NetNS)}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.startEtcd(ctx); err != nil {
		return nil, err
	}
	if err := c.api.store(ctx, append(objects, nodeObject(config.Node))); err != nil {
		return nil, fmt.Errorf("write objects to etcd: %w", err)
	}
	return c, c.startServer(ctx)
}

// Close ends all processes and removes what they wrote.
func (c *Cluster) Close() error {
	c.proxy.kill()
	c.server.kill() // before etcd: it hangs without
	c.etcd.kill()
	c.api.client.CloseIdleConnections()
	return os.RemoveAll(c.folder)
}

func (c *Cluster) startEtcd(ctx context.Context) (err error) {
	c.etcd, err = c.start("etcd", nil, "--data-dir", filepath.Join(c.folder, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls=http://"+etcdAddress, "--advertise-client-urls=http://"+etcdAddress,
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=default=http://127.0.0.1:2380")
	if err != nil {
		return err
	}
	return c.etcd.until(ctx, func() error { return c.api.get(ctx, "http://"+etcdAddress+"/health", nil) })
}

// startServer runs the API server; the token may do everything.
func (c *Cluster) startServer(ctx context.Context) (err error) {
	key, err := c.writeKey()
	if err != nil {
		return err
	}
	tokens := filepath.Join(c.folder, "tokens.csv")
	if err := os.WriteFile(tokens, []byte(token+",bench,bench,system:masters\n"), 0o600); err != nil {
		return err
	}
	c.server, err = c.start("kube-apiserver", nil, "--etcd-servers=http://"+etcdAddress, "--bind-address=127.0.0.1",
		"--secure-port=6443", "--advertise-address="+c.config.Node.String(), "--cert-dir="+filepath.Join(c.folder, "certs"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+key,
		"--token-auth-file="+tokens, "--service-account-signing-key-file="+key, "--service-cluster-ip-range=10.96.0.0/12", "--authorization-mode=AlwaysAllow")
	if err != nil {
		return err
	}
	return c.server.until(ctx, func() error { return c.api.get(ctx, "https://"+apiAddress+"/readyz", nil) })
}

// StartProxy starts kube-proxy and returns at once.
func (c *Cluster) StartProxy(mode Mode) error {
	config, err := c.proxyConfig(mode)
	if err != nil {
		return err
	}
	path, err := c.legacyPath()
	if err != nil {
		return err
	}
	c.proxy, err = c.start("kube-proxy", []string{"PATH=" + path}, "--config="+config)
	return err
}

// StopProxy ends kube-proxy; its rules stay.
func (c *Cluster) StopProxy() {
	c.proxy.kill()
	c.proxy = nil
}

// ProxyLog is the end of what kube-proxy has said.
func (c *Cluster) ProxyLog() string { return c.proxy.tail() }

// start runs a binary in the node's network namespace and cgroup.
func (c *Cluster) start(name string, env []string, args ...string) (*process, error) {
	log, err := os.Create(filepath.Join(c.folder, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	group, err := os.Open(c.config.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer group.Close()
	cmd := exec.Command(filepath.Join(c.config.Binaries, name), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.folder, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	if err := netdev.InNetNS(c.config.NetNS, cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, cmd: cmd, log: log.Name(), ended: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// process is a running component.
type process struct {
	name  string
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
	err   error // once ended
}

func (p *process) kill() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// until repeats check until it succeeds. A process that ends makes it fail.
func (p *process) until(ctx context.Context, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %s", p.name, err, p.tail())
		case <-p.ended:
			return fmt.Errorf("%s ended: %w: %s", p.name, p.err, p.tail())
		case <-ticker.C:
		}
	}
}

// tail is the end of its log.
func (p *process) tail() string {
	if p == nil {
		return ""
	}
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-2000):])
}
