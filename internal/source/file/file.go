// SPDX-License-Identifier: Apache-2.0

// Package file is the source that reads a folder of Kubernetes manifests: the
// whole cluster, as far as an agent without Kubernetes knows it. It watches the
// folder (*.yaml, *.yml and *.json, not its subfolders, no names that begin
// with a dot) and keeps the node, namespace, workload, service, endpoint and
// policy tables equal to it, one transaction for each load.
//
// What is wrong becomes a row of the source-error table, and what was in force
// stays in force until the manifest is mended:
//
//   - A bad document that names an object which its file defined before keeps
//     the last good form of that object.
//   - A bad document that names no such object (it may be any of them) keeps
//     every object that its file defined before and does not define now.
//   - A file that cannot be read, or is too large, keeps all its objects.
//   - A folder that is missing or cannot be listed keeps everything; it may
//     come back, be replaced or be created later.
//   - An object that two files define is taken from the file that had it first.
//     At the first load that is the first in the order of names.
//
// "Before" reaches back to the start of the agent: the last good form is not on
// disk.
//
// The file named generation holds a decimal number that the writer of the
// folder raises after everything else is written. It is read before the
// manifests, so Progress never reports a generation whose manifests are not in
// the tables.
package file

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// Limits of the folder.
const (
	// MaxFiles is how many manifests are read; those beyond are an error.
	MaxFiles = 10000
	// maxFileErrors is how many bad documents of one file get a row each.
	maxFileErrors = 100
	// generationFile is the name of the file with the generation.
	generationFile = "generation"
)

// Config is the part of the agent's configuration that says where manifests
// are.
type Config struct {
	// Folder is the path of the manifest folder. It need not exist yet.
	Folder string `json:"folder"`
}

// Validate reports what is wrong with the configuration.
func (c Config) Validate() error {
	if c.Folder == "" {
		return errors.New("folder is empty: want the path of the manifest folder")
	}
	return nil
}

// Progress is how far a source has come.
type Progress struct {
	// Generation is the number in the generation file before the manifests
	// were read that are now in the tables; 0 without such a file.
	Generation uint64
	// Loads counts the loads. 0 means that the tables are not filled yet.
	Loads uint64
	// Problems is how many rows the source-error table has.
	Problems int
}

// Source reads one folder.
type Source struct {
	folder string
	tables *state.Tables
	log    *slog.Logger
	files  map[string]*file             // by name; of Run's goroutine only
	owners map[manifest.Ref]string      // the file that each object is taken from
	errors map[string]state.SourceError // as in the table, to log changes only

	mu       sync.Mutex // protects the two below
	progress Progress
	changed  chan struct{} // closed at the next change of progress
}

// New makes a source. It reads nothing before Run.
func New(c Config, t *state.Tables, log *slog.Logger) (*Source, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("manifest source: %w", err)
	}
	folder, err := filepath.Abs(c.Folder)
	if err != nil {
		return nil, fmt.Errorf("manifest source: %w", err)
	}
	return &Source{
		folder: folder, tables: t, log: log,
		files: map[string]*file{}, owners: map[manifest.Ref]string{}, changed: make(chan struct{}),
	}, nil
}

// Generation is the generation of what is in the tables.
func (s *Source) Generation() uint64 {
	p, _ := s.Progress()
	return p.Generation
}

// Progress returns how far the source has come, and a channel that is closed
// when that changes.
func (s *Source) Progress() (Progress, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.progress, s.changed
}

// Wait returns once the tables hold at least generation g, or with ctx's error.
func (s *Source) Wait(ctx context.Context, g uint64) error {
	for {
		p, changed := s.Progress()
		if p.Loads > 0 && p.Generation >= g {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for generation %d of %s, now at %d: %w", g, s.folder, p.Generation, ctx.Err())
		}
	}
}

func (s *Source) setProgress(generation uint64, problems int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress = Progress{Generation: generation, Loads: s.progress.Loads + 1, Problems: problems}
	close(s.changed)
	s.changed = make(chan struct{})
}

// Timing of loads.
const (
	// quiet is how long nothing must change before a load: editors write in
	// several steps.
	quiet = 30 * time.Millisecond
	// longest is how long changes that do not end may put off a load.
	longest = 500 * time.Millisecond
	// rescan is how often the folder is read without being told to. It finds
	// what no notification tells: a file system without any, a symbolic link
	// on the way that points elsewhere.
	rescan = 15 * time.Second
)

// Run loads the folder and then each change of it, until ctx ends; then it
// returns nil.
func (s *Source) Run(ctx context.Context) error {
	w, err := newWatch(s.folder)
	if err != nil {
		return fmt.Errorf("watch %s: %w", s.folder, err)
	}
	defer w.close()
	for {
		if err := w.arm(); err != nil {
			s.log.Warn("manifest folder is not watched, only read from time to time", "folder", s.folder, "error", err)
		}
		if err := s.load(); err != nil {
			return fmt.Errorf("load %s: %w", s.folder, err)
		}
		if !w.next(ctx) {
			return nil
		}
	}
}
