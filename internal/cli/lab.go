// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/weft-mesh/weft/internal/lab"
	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/daemon"
	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/lab/shim"
	"github.com/weft-mesh/weft/internal/source/manifest"
)

const (
	defaultLab     = "weft"
	defaultTimeout = time.Minute
)

func newLabCommand(s IO) *cobra.Command {
	l := &labFlag{}
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Run a cluster on this machine: nodes and pods are network namespaces",
		Long: `Run a cluster on this machine: nodes and pods are network namespaces, agents and
containers are real processes. Input is ordinary Kubernetes manifests; images are
not pulled: the command of a container runs from this machine's file system.

up, apply and delete return when what they changed is in force on every node, or
end with exit code 1 and say what is not and why.`,
		Args: cobra.NoArgs,
	}
	cmd.PersistentFlags().StringVar(&l.name, "name", "", "name of the lab (default $"+layout.EnvLab+", else "+defaultLab+")")
	cmd.AddCommand(
		newLabUpCommand(s, l), newLabApplyCommand(s, l), newLabDeleteCommand(s, l), newLabStatusCommand(s, l),
		newLabExecCommand(s, l), newLabLogsCommand(s, l), newLabNodeCommand(s, l), newLabAgentCommand(s, l),
		newLabDownCommand(s, l), newLabDaemonCommand(s), newLabShimCommand(s),
	)
	return cmd
}

// labFlag is the lab that a command is about.
type labFlag struct{ name string }

func (l *labFlag) lab() string {
	switch {
	case l.name != "":
		return l.name
	case os.Getenv(layout.EnvLab) != "":
		return os.Getenv(layout.EnvLab)
	}
	return defaultLab
}

func (l *labFlag) client() (*lab.Client, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("weft lab makes network namespaces and BPF programs: run it as root")
	}
	return lab.NewClient(l.lab())
}

// filesFlag are -f and --timeout.
type filesFlag struct {
	paths   []string
	timeout time.Duration
}

func (f *filesFlag) register(cmd *cobra.Command) {
	cmd.Flags().StringArrayVarP(&f.paths, "filename", "f", nil, "manifest file, folder of them, or - for standard input; may be repeated")
	f.registerTimeout(cmd)
	if err := cmd.MarkFlagRequired("filename"); err != nil {
		panic(err) // the flag is not there: a mistake in this function
	}
}

func (f *filesFlag) registerTimeout(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&f.timeout, "timeout", defaultTimeout, "how long to wait until it is in force")
}

func (f *filesFlag) read(in io.Reader) ([]api.File, error) { return lab.ReadFiles(f.paths, in) }

// report prints progress as it comes, and a refusal line by line.
func report(s IO, do func(progress func(string)) error) error {
	began := time.Now()
	err := do(func(line string) {
		fmt.Fprintf(s.Err, "%6.2fs  %s\n", time.Since(began).Seconds(), line)
	})
	var refused *lab.Refused
	if !errors.As(err, &refused) {
		return err
	}
	for _, e := range refused.Errors {
		fmt.Fprintln(s.Err, manifest.Format(e))
	}
	return err
}

func newLabUpCommand(s IO, l *labFlag) *cobra.Command {
	var f filesFlag
	var cfg daemon.Config
	var agentFile string
	cmd := &cobra.Command{
		Use:   "up -f DIR",
		Short: "Start a lab and apply manifests to it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := l.client()
			if err != nil {
				return err
			}
			files, err := f.read(s.In)
			if err != nil {
				return err
			}
			if cfg.Agent, err = readAgentConfig(agentFile); err != nil {
				return err
			}
			cfg.Name = l.lab()
			if cfg.Weft, err = os.Executable(); err != nil {
				return fmt.Errorf("find the executable of weft: %w", err)
			}
			err = report(s, func(progress func(string)) error {
				return c.Up(cmd.Context(), cfg, files, f.timeout, progress)
			})
			var not *lab.NotInForce
			if errors.As(err, &not) {
				fmt.Fprintln(s.Err, "the lab is up all the same: see `weft lab status`, or remove it with `weft lab down`")
			}
			return err
		},
	}
	f.register(cmd)
	cmd.Flags().IntVar(&cfg.Nodes, "nodes", 2, "number of nodes")
	cmd.Flags().StringVar(&cfg.Tunnel, "tunnel", "none", "how pods reach other nodes: none (routed) or vxlan")
	cmd.Flags().IntVar(&cfg.MTU, "mtu", 1500, "MTU of the underlay, in bytes")
	cmd.Flags().StringVar(&agentFile, "agent-config", "", "YAML file that is laid over the configuration of every agent")
	complete(cmd, "tunnel", "none", "vxlan")
	return cmd
}

func readAgentConfig(path string) (map[string]any, error) {
	if path == "" {
		return nil, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the configuration of agents: %w", err)
	}
	var m map[string]any
	if err := yaml.UnmarshalStrict(b, &m); err != nil {
		return nil, fmt.Errorf("read the configuration of agents %s: %w", path, err)
	}
	return m, nil
}

func newLabApplyCommand(s IO, l *labFlag) *cobra.Command {
	return newLabFilesCommand(s, l, "apply -f FILE", "Add or change objects, all or none", (*lab.Client).Apply)
}

func newLabDeleteCommand(s IO, l *labFlag) *cobra.Command {
	return newLabFilesCommand(s, l, "delete -f FILE", "Delete the objects that manifests name", (*lab.Client).Delete)
}

type labVerb func(*lab.Client, context.Context, []api.File, time.Duration, func(string)) error

func newLabFilesCommand(s IO, l *labFlag, use, short string, verb labVerb) *cobra.Command {
	var f filesFlag
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := l.client()
			if err != nil {
				return err
			}
			files, err := f.read(s.In)
			if err != nil {
				return err
			}
			return report(s, func(progress func(string)) error {
				return verb(c, cmd.Context(), files, f.timeout, progress)
			})
		},
	}
	f.register(cmd)
	return cmd
}

func newLabDownCommand(_ IO, l *labFlag) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Remove a lab with all that it made, also after a crash",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := l.client()
			if err != nil {
				return err
			}
			return c.Down(cmd.Context())
		},
	}
}

func newLabAgentCommand(s IO, l *labFlag) *cobra.Command {
	var f filesFlag
	cmd := &cobra.Command{
		Use:       "agent kill|start|restart NODE",
		Short:     "Kill (SIGKILL), start or restart (SIGTERM) the agent of a node",
		ValidArgs: []string{"kill", "start", "restart"},
		Args:      cobra.MatchAll(cobra.ExactArgs(2), firstOf("kill", "start", "restart")),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := l.client()
			if err != nil {
				return err
			}
			verb := api.AgentVerb{Verb: args[0], Node: args[1], Timeout: f.timeout}
			return report(s, func(progress func(string)) error { return c.Agent(cmd.Context(), verb, progress) })
		},
	}
	f.registerTimeout(cmd)
	return cmd
}

// firstOf wants the first argument to be one of words.
func firstOf(words ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		for _, w := range words {
			if args[0] == w {
				return nil
			}
		}
		return fmt.Errorf("%q: want one of %s", args[0], strings.Join(words, ", "))
	}
}

// newLabDaemonCommand is the process that `up` starts.
func newLabDaemonCommand(s IO) *cobra.Command {
	return &cobra.Command{
		Use:    "daemon CONFIG",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var cfg daemon.Config
			if err := json.Unmarshal([]byte(args[0]), &cfg); err != nil {
				return fmt.Errorf("decode the configuration of the lab: %w", err)
			}
			lay, err := layout.New(cfg.Name)
			if err != nil {
				return err
			}
			return daemon.Run(cmd.Context(), cfg, lay, slog.New(slog.NewJSONHandler(s.Err, nil)))
		},
	}
}

// newLabShimCommand becomes a command somewhere else; see package shim.
func newLabShimCommand(s IO) *cobra.Command {
	return &cobra.Command{
		Use:    "shim SPEC",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			err := shim.Run(args[0])
			fmt.Fprintln(s.Err, "weft:", err)
			var failed *shim.Error
			if errors.As(err, &failed) {
				return &ExitError{Code: failed.Code}
			}
			return &ExitError{Code: shim.ExitSetup}
		},
	}
}
