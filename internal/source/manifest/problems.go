// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"encoding/json"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/weft-mesh/weft/internal/state"
)

// maxValue is how much of a wrong value a message repeats, in bytes.
const maxValue = 80

// problems collects what is wrong with one document.
type problems struct {
	list []problem
	more int // beyond maxProblems
}

type problem struct {
	field   string
	message string
}

// add reports that the value at path is not what was wanted.
func (p *problems) add(path *field.Path, value any, want string) {
	p.say(path, "%s: want %s", show(value), want)
}

// missing reports that there is nothing at path.
func (p *problems) missing(path *field.Path, want string) { p.say(path, "missing: want %s", want) }

// refuse reports a value that is well-formed and cannot be had.
func (p *problems) refuse(path *field.Path, value any, why string) {
	p.say(path, "%s: %s", show(value), why)
}

func (p *problems) say(path *field.Path, format string, args ...any) {
	if len(p.list) >= maxProblems {
		p.more++
		return
	}
	name := ""
	if path != nil {
		name = path.String()
	}
	p.list = append(p.list, problem{field: name, message: fmt.Sprintf(format, args...)})
}

// ok is true as long as nothing was reported.
func (p *problems) ok() bool { return len(p.list) == 0 }

func (p *problems) errors(file string, document int) []state.SourceError {
	errs := make([]state.SourceError, 0, len(p.list))
	for _, x := range p.list {
		errs = append(errs, state.SourceError{File: file, Document: document, Field: x.field, Message: x.message})
	}
	if p.more > 0 {
		errs[len(errs)-1].Message += fmt.Sprintf(" (and %d more problems)", p.more)
	}
	return errs
}

// show prints a value as JSON, cut to what fits a message.
func show(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case map[string]any:
		if len(v) > 3 {
			return "an object"
		}
	case []any:
		if len(v) > 3 {
			return "a list"
		}
	}
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Sprintf("%T", v)
	}
	s := strings.TrimSpace(b.String())
	if len(s) > maxValue {
		s = strings.ToValidUTF8(s[:maxValue], "") + "…"
	}
	return s
}

// nearest returns the one of known that a is probably a misspelling of: it
// differs in at most two letters.
func nearest(a string, known []string) (string, bool) {
	best, bestDistance := "", 3
	for _, k := range known {
		if len(k) < 4 && len(a) < 4 {
			continue
		}
		if d := distance(strings.ToLower(a), strings.ToLower(k), bestDistance); d < bestDistance {
			best, bestDistance = k, d
		}
	}
	return best, best != ""
}

// distance is the number of letters to insert, delete or replace to turn a into
// b, or limit if it is no less than that.
func distance(a, b string, limit int) int {
	if len(a)-len(b) >= limit || len(b)-len(a) >= limit {
		return limit
	}
	prev := make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := range len(a) {
		row := make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(row[j]+1, prev[j+1]+1, prev[j]+cost)
		}
		prev = row
	}
	return min(prev[len(b)], limit)
}
