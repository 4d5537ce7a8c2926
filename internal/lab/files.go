// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/weft-mesh/weft/internal/lab/api"
)

// ReadFiles reads manifests: files, folders with all that is below them, and
// "-" for in. In a folder only .yaml, .yml and .json files count, and nothing
// whose name begins with a dot.
func ReadFiles(paths []string, in io.Reader) ([]api.File, error) {
	var files []api.File
	for _, path := range paths {
		if path == "-" {
			b, err := io.ReadAll(in)
			if err != nil {
				return nil, fmt.Errorf("read standard input: %w", err)
			}
			files = append(files, api.File{Name: "standard input", Data: b})
			continue
		}
		found, err := readPath(path)
		if err != nil {
			return nil, err
		}
		files = append(files, found...)
	}
	return files, nil
}

func readPath(path string) ([]api.File, error) {
	var files []api.File
	err := filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case p != path && strings.HasPrefix(d.Name(), "."):
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir(), p != path && !manifestName(p):
			return nil
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		files = append(files, api.File{Name: p, Data: b})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("read manifests: there is no .yaml, .yml or .json file in %s", path)
	}
	return files, nil
}

func manifestName(path string) bool {
	switch filepath.Ext(path) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}
