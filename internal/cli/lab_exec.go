// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/lab"
	"github.com/weft-mesh/weft/internal/lab/logfile"
)

// nameAndCommand wants NAME -- CMD ARG...
func nameAndCommand(cmd *cobra.Command, args []string) error {
	if cmd.ArgsLenAtDash() != 1 || len(args) < 2 {
		return fmt.Errorf("want `%s`", cmd.UseLine())
	}
	return nil
}

// passOn runs a command with the streams of this one and ends with its code.
func (s IO) passOn(run func(weft string, streams lab.Streams) (int, error)) error {
	weft, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the executable of weft: %w", err)
	}
	code, err := run(weft, lab.Streams{In: s.In, Out: s.Out, Err: s.Err})
	if err != nil {
		return err
	}
	if code != 0 {
		return &ExitError{Code: code}
	}
	return nil
}

func newLabExecCommand(s IO, l *labFlag) *cobra.Command {
	var container string
	cmd := &cobra.Command{
		Use:                   "exec NS/POD [-c CONTAINER] -- CMD [ARG...]",
		DisableFlagsInUseLine: true,
		Short:                 "Run a command in a pod; NS/deploy/NAME means its first ready pod",
		Args:                  nameAndCommand,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := l.client()
			if err != nil {
				return err
			}
			t, err := c.Target(cmd.Context(), args[0], container)
			if err != nil {
				return err
			}
			return s.passOn(func(weft string, streams lab.Streams) (int, error) {
				return c.Exec(cmd.Context(), weft, t, args[1:], streams)
			})
		},
	}
	cmd.Flags().StringVarP(&container, "container", "c", "", "container (default the first)")
	return cmd
}

func newLabNodeCommand(s IO, l *labFlag) *cobra.Command {
	cmd := &cobra.Command{Use: "node", Short: "Look at nodes", Args: cobra.NoArgs}
	cmd.AddCommand(&cobra.Command{
		Use:                   "exec NODE -- CMD [ARG...]",
		DisableFlagsInUseLine: true,
		Short:                 "Run a command on a node; the node `outside` is the world outside of the cluster",
		Args:                  nameAndCommand,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := l.client()
			if err != nil {
				return err
			}
			return s.passOn(func(weft string, streams lab.Streams) (int, error) {
				return c.NodeExec(cmd.Context(), weft, args[0], args[1:], streams)
			})
		},
	})
	return cmd
}

func newLabLogsCommand(s IO, l *labFlag) *cobra.Command {
	var container string
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs NS/POD",
		Short: "Print the output of a container; NS/deploy/NAME means its first ready pod",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := l.client()
			if err != nil {
				return err
			}
			t, err := c.Target(cmd.Context(), args[0], container)
			if err != nil {
				return err
			}
			err = logfile.Copy(cmd.Context(), s.Out, t.Log, follow)
			if errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("container %s of pod %s has not been started", t.Container, t.Pod)
			}
			if errors.Is(err, context.Canceled) {
				return nil
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&container, "container", "c", "", "container (default the first)")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until interrupted")
	return cmd
}
