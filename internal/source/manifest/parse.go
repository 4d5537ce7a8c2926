// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"
	kyaml "sigs.k8s.io/yaml"
)

// chunk is the text of one document.
type chunk struct {
	number int // of the document
	line   int // 1-based, of the first line of data
	data   []byte
	json   bool
}

// split cuts a file into documents, so that a syntax error of one does not
// hide the others.
func split(file string, data []byte) ([]chunk, error) {
	if strings.HasSuffix(file, ".json") {
		return splitJSON(data)
	}
	return splitYAML(data)
}

// splitYAML cuts at lines that begin with "---", which YAML forbids inside of a
// document, whatever the quoting. What stands before the first of them counts
// as a document only if there is something in it.
func splitYAML(data []byte) ([]chunk, error) {
	var chunks []chunk
	cur := chunk{line: 1}
	line, marked := 1, false
	flush := func() {
		if marked || !blank(cur.data) {
			chunks = append(chunks, cur)
			cur.number++
		}
	}
	for rest := data; len(rest) > 0; line++ {
		end := bytes.IndexByte(rest, '\n') + 1
		if end == 0 {
			end = len(rest)
		}
		text := rest[:end]
		rest = rest[end:]
		if !separator(text) {
			cur.data = append(cur.data, text...)
			continue
		}
		flush()
		if len(chunks) > MaxDocuments {
			break
		}
		// The rest of the line belongs to the document: "--- {kind: Pod}".
		marked = true
		cur.line, cur.data = line, append([]byte("   "), text[3:]...)
		if blank(text[3:]) {
			cur.line, cur.data = line+1, nil
		}
	}
	flush()
	if len(chunks) > MaxDocuments {
		return nil, fmt.Errorf("file has more than %d documents: want several files", MaxDocuments)
	}
	return chunks, nil
}

func separator(line []byte) bool {
	return bytes.HasPrefix(line, []byte("---")) && (len(line) == 3 || bytes.IndexByte([]byte(" \t\r\n"), line[3]) >= 0)
}

// blank is true for nothing but space, comments, directives and end marks.
func blank(data []byte) bool {
	for line := range bytes.Lines(data) {
		text := bytes.TrimSpace(line)
		if len(text) > 0 && text[0] != '#' && line[0] != '%' && string(text) != "..." {
			return false
		}
	}
	return true
}

// splitJSON cuts a sequence of JSON values. A syntax error ends the last chunk:
// nothing tells where the next value would begin.
func splitJSON(data []byte) ([]chunk, error) {
	var chunks []chunk
	for number := 0; ; number++ {
		data = data[len(data)-len(bytes.TrimLeft(data, " \t\r\n")):]
		if len(data) == 0 {
			return chunks, nil
		}
		if number == MaxDocuments {
			return nil, fmt.Errorf("file has more than %d documents: want several files", MaxDocuments)
		}
		dec := json.NewDecoder(bytes.NewReader(data))
		var raw json.RawMessage
		c := chunk{number: number, json: true}
		if err := dec.Decode(&raw); err != nil {
			c.data = data
			return append(chunks, c), nil
		}
		c.data = data[:dec.InputOffset()]
		data = data[dec.InputOffset():]
		chunks = append(chunks, c)
	}
}

// parse turns a chunk into the tree of JSON values and the JSON text of it.
// The tree is nil for an empty chunk and where nothing could be read.
func parse(c chunk, p *problems) (tree any, body []byte) {
	body = c.data
	if !c.json {
		if blank(c.data) {
			return nil, nil
		}
		var err error
		if body, err = kyaml.YAMLToJSON(c.data); err != nil {
			p.say(nil, "%s: want YAML", inFile(err, c.line))
			return nil, nil
		}
		duplicateKeys(c, p)
	}
	strict, err := kjson.UnmarshalStrict(body, &tree)
	if err != nil {
		p.say(nil, "%s: want JSON", syntax(err))
		return nil, nil
	}
	for _, e := range strict {
		p.strict(e)
	}
	return tree, body
}

func syntax(err error) string {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return "unexpected end"
	}
	if ok, offset := kjson.SyntaxErrorOffset(err); ok {
		return fmt.Sprintf("%v at byte %d of the document", err, offset)
	}
	return err.Error()
}

func (p *problems) strict(err error) {
	var fe kjson.FieldError
	if !errors.As(err, &fe) {
		p.say(nil, "%v", err)
		return
	}
	p.say(field.NewPath(fe.FieldPath()), "key appears twice: want it once")
}

var yamlLine = regexp.MustCompile(`line (\d+)`)

// inFile makes the message of a YAML error one line, with lines of the file
// instead of lines of the document.
func inFile(err error, first int) string {
	text := strings.TrimPrefix(err.Error(), "error converting YAML to JSON: ")
	text = strings.Join(strings.Fields(strings.TrimPrefix(text, "yaml: ")), " ")
	return yamlLine.ReplaceAllStringFunc(text, func(m string) string {
		n, err := strconv.Atoi(m[len("line "):])
		if err != nil {
			return m
		}
		return fmt.Sprintf("line %d", n+first-1)
	})
}

// duplicateKeys reports keys that a YAML mapping has twice. It parses again,
// because only nodes know lines, and only where the strict reader objects.
func duplicateKeys(c chunk, p *problems) {
	if _, err := kyaml.YAMLToJSONStrict(c.data); err == nil {
		return
	}
	var root yaml.Node
	if err := yaml.Unmarshal(c.data, &root); err != nil {
		p.say(nil, "%s: want YAML", inFile(err, c.line))
		return
	}
	before := len(p.list)
	findDuplicates(&root, nil, c.line, p)
	if len(p.list) == before {
		_, err := kyaml.YAMLToJSONStrict(c.data)
		p.say(nil, "%s: want each key once", inFile(err, c.line))
	}
}

// findDuplicates walks nodes; aliases are not followed, the anchor was seen.
func findDuplicates(n *yaml.Node, path *field.Path, first int, p *problems) {
	switch n.Kind {
	case yaml.DocumentNode:
		for _, c := range n.Content {
			findDuplicates(c, path, first, p)
		}
	case yaml.SequenceNode:
		for i, c := range n.Content {
			findDuplicates(c, path.Index(i), first, p)
		}
	case yaml.MappingNode:
		seen := map[string]int{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			at := path.Child(key.Value)
			if line, twice := seen[key.Value]; twice {
				p.say(at, "key appears on line %d and again, with value %s, on line %d: want it once",
					line+first-1, nodeValue(value), key.Line+first-1)
			}
			seen[key.Value] = key.Line
			findDuplicates(value, at, first, p)
		}
	}
}

func nodeValue(n *yaml.Node) string {
	if n.Kind == yaml.ScalarNode {
		return show(n.Value)
	}
	var v any
	if err := n.Decode(&v); err != nil {
		return "of another kind"
	}
	return show(v)
}
