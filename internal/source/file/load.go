// SPDX-License-Identifier: Apache-2.0

package file

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// file is what is known of one manifest file. It is immutable.
type file struct {
	sum  [sha256.Size]byte
	good map[manifest.Ref]*object // defined by the file as it is now
	kept map[manifest.Ref]*object // defined before, in force because the file is bad
	bad  []state.SourceError      // one for each bad document
}

// object is a manifest object with the row that it becomes.
type object struct {
	*manifest.Object
	row any // *state.Node and so on; nil for kinds without a row
}

// load reads the folder and brings the tables to it.
func (s *Source) load() error {
	generation, problems := s.readGeneration()
	names, folderProblem := s.list()
	if folderProblem != nil {
		problems = append(problems, *folderProblem)
	}
	if names == nil {
		generation = s.Generation() // nothing newer was read
	} else {
		s.readFiles(names)
	}
	want := rows{}
	problems = append(problems, s.merge(&want)...)
	problems = onePerDocument(problems)
	changes, err := s.write(&want, problems)
	if err != nil {
		return err
	}
	s.report(changes, generation, problems)
	s.setProgress(generation, len(problems))
	return nil
}

// readGeneration returns the last generation, and a problem, where the file
// cannot be read.
func (s *Source) readGeneration() (uint64, []state.SourceError) {
	data, err := readLimited(filepath.Join(s.folder, generationFile), 32)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	text := strings.TrimSpace(string(data))
	var g uint64
	if err == nil {
		g, err = strconv.ParseUint(text, 10, 64)
	}
	if err == nil {
		return g, nil
	}
	message := fmt.Sprintf("%q: want a decimal number of at most 64 bits", text)
	if !errors.Is(err, strconv.ErrSyntax) && !errors.Is(err, strconv.ErrRange) {
		message = err.Error()
	}
	return s.Generation(), []state.SourceError{{File: generationFile, Message: message}}
}

// list returns the names of the manifests in order; nil where the folder
// cannot be listed.
func (s *Source) list() ([]string, *state.SourceError) {
	entries, err := os.ReadDir(s.folder)
	if err != nil {
		return nil, &state.SourceError{File: s.folder, Message: fmt.Sprintf("read the manifest folder: %v", err)}
	}
	names := []string{}
	for _, e := range entries {
		if isManifest(e.Name()) && !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	if len(names) <= MaxFiles {
		return names, nil
	}
	// Files that are in force stay, new ones have to wait.
	known := func(name string) bool { return s.files[name] != nil }
	slices.SortStableFunc(names, func(a, b string) int {
		switch {
		case known(a) == known(b):
			return 0
		case known(a):
			return -1
		}
		return 1
	})
	problem := &state.SourceError{File: s.folder, Message: fmt.Sprintf("folder has %d manifests: want at most %d; %s and those after it are not read",
		len(names), MaxFiles, names[MaxFiles])}
	names = names[:MaxFiles]
	slices.Sort(names)
	return names, problem
}

func isManifest(name string) bool {
	if strings.HasPrefix(name, ".") {
		return false
	}
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

// readFiles brings s.files to the named ones.
func (s *Source) readFiles(names []string) {
	files := make(map[string]*file, len(names))
	for _, name := range names {
		if f := readFile(filepath.Join(s.folder, name), name, s.files[name]); f != nil {
			files[name] = f
		}
	}
	s.files = files
}

// readFile reads a manifest; before is what it was, or nil. It returns nil for
// a file that is gone.
func readFile(path, name string, before *file) *file {
	data, err := readLimited(path, manifest.MaxFileSize+1)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		f := &file{bad: []state.SourceError{{File: name, Message: fmt.Sprintf("read the file: %v", err)}}}
		f.keep(before, func(manifest.Ref) bool { return true })
		return f
	}
	sum := sha256.Sum256(data)
	if before != nil && before.sum == sum {
		return before
	}
	f := &file{sum: sum, good: map[manifest.Ref]*object{}}
	f.take(manifest.Documents(name, data), before)
	return f
}

// take sorts documents into good, kept and bad.
func (f *file) take(docs []manifest.Document, before *file) {
	names := map[manifest.Ref]bool{}
	all := false
	for _, d := range docs {
		if d.Object != nil {
			f.good[d.Ref] = sameRow(newObject(d.Object), before)
			continue
		}
		f.bad = append(f.bad, d.Errors...)
		names[d.Ref] = true
		all = all || before.get(d.Ref) == nil
	}
	if len(f.bad) > 0 {
		f.keep(before, func(r manifest.Ref) bool { return all || names[r] })
	}
}

func (f *file) keep(before *file, which func(manifest.Ref) bool) {
	f.kept = map[manifest.Ref]*object{}
	if before == nil {
		return
	}
	for _, objs := range []map[manifest.Ref]*object{before.good, before.kept} {
		for r, o := range objs {
			if f.good[r] == nil && which(r) {
				f.kept[r] = o
			}
		}
	}
}

// get returns what the file has in force for r, or nil.
func (f *file) get(r manifest.Ref) *object {
	if f == nil {
		return nil
	}
	if o := f.good[r]; o != nil {
		return o
	}
	return f.kept[r]
}

// readLimited reads at most limit bytes. It does not wait for the writer of a
// named pipe.
func readLimited(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("want a regular file")
	}
	var data []byte
	if err == nil {
		data, err = io.ReadAll(io.LimitReader(f, limit))
	}
	return data, errors.Join(err, f.Close())
}

// merge puts the objects of all files together and returns what is bad. An
// object that is defined twice comes from the file it came from before.
func (s *Source) merge(want *rows) []state.SourceError {
	names := make([]string, 0, len(s.files))
	for name := range s.files {
		names = append(names, name)
	}
	slices.Sort(names)
	owners := map[manifest.Ref]string{}
	for _, name := range names {
		for r := range s.files[name].good {
			if _, taken := owners[r]; !taken || s.owners[r] == name {
				owners[r] = name
			}
		}
	}
	var problems []state.SourceError
	for _, name := range names {
		f := s.files[name]
		problems = append(problems, f.bad...)
		for r, o := range f.good {
			if owner := owners[r]; owner != name {
				problems = append(problems, state.SourceError{File: name, Document: o.Document, Field: "metadata.name",
					Message: manifest.Duplicate(r, owner, s.files[owner].good[r].Document)})
			}
		}
		for r := range f.kept {
			if _, taken := owners[r]; !taken {
				owners[r] = name
			}
		}
	}
	for r, name := range owners {
		want.add(s.files[name].get(r).row)
	}
	s.owners = owners
	return problems
}

// onePerDocument puts all that is wrong with a document into one error, as the
// table wants it, and bounds how many a file has.
func onePerDocument(errs []state.SourceError) []state.SourceError {
	type place struct {
		file     string
		document int
	}
	slices.SortStableFunc(errs, func(a, b state.SourceError) int {
		if c := strings.Compare(a.File, b.File); c != 0 {
			return c
		}
		return a.Document - b.Document
	})
	var out []state.SourceError
	at, inFile, left := place{document: -1}, 0, 0
	for _, e := range errs {
		if e.File != at.file {
			inFile, left = 0, 0
		}
		last := len(out) - 1
		switch p := (place{e.File, e.Document}); {
		case p == at && left == 0:
			out[last].Message += "; " + strings.TrimPrefix(e.Field+": ", ": ") + e.Message
			continue
		case p == at:
			continue
		case inFile == maxFileErrors:
			left++
			out[last].Message = strings.TrimSuffix(out[last].Message, more(left-1)) + more(left)
		default:
			inFile++
			out = append(out, e)
		}
		at = place{e.File, e.Document}
	}
	return out
}

func more(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" (and %d more bad documents in this file)", n)
}

// report logs what changed.
func (s *Source) report(changes int, generation uint64, problems []state.SourceError) {
	now := make(map[string]state.SourceError, len(problems))
	for _, e := range problems {
		key := errorKey(&e)
		now[key] = e
		if s.errors[key] != e {
			s.log.Warn("manifest is not accepted", "file", e.File, "document", e.Document, "field", e.Field, "problem", e.Message)
		}
	}
	for key, e := range s.errors {
		if _, still := now[key]; !still {
			s.log.Info("manifest is mended", "file", e.File, "document", e.Document)
		}
	}
	s.errors = now
	if changes > 0 {
		s.log.Info("manifests are loaded", "files", len(s.files), "changes", changes, "generation", generation, "problems", len(problems))
	}
}
