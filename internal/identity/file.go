// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/weft-mesh/weft/internal/state"
)

// fileVersion is the layout of the file, raised when a reader of the old one
// could not read the new one.
const fileVersion = 1

// envelope is the file: the content and the SHA-256 of its bytes, in hex. A
// flipped digit in a number must not go unnoticed.
type envelope struct {
	Version int             `json:"version"`
	SHA256  string          `json:"sha256"`
	Content json.RawMessage `json:"content"`
}

// content is what there is to keep.
type content struct {
	// Next is greater than every number that was ever handed out.
	Next       uint64            `json:"next"`
	Identities []*state.Identity `json:"identities"`
}

func encode(c content) ([]byte, error) {
	body, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("encode identities: %w", err)
	}
	sum := sha256.Sum256(body)
	data, err := json.Marshal(envelope{Version: fileVersion, SHA256: hex.EncodeToString(sum[:]), Content: body})
	if err != nil {
		return nil, fmt.Errorf("encode identities: %w", err)
	}
	return append(data, '\n'), nil
}

func decode(data []byte) (content, error) {
	var e envelope
	if err := strict(data, &e); err != nil {
		return content{}, fmt.Errorf("content is damaged: %w", err)
	}
	if e.Version != fileVersion {
		return content{}, fmt.Errorf("version is %d: want %d", e.Version, fileVersion)
	}
	sum := sha256.Sum256(e.Content)
	if hex.EncodeToString(sum[:]) != e.SHA256 {
		return content{}, errors.New("content is damaged: its checksum does not match")
	}
	var c content
	if err := strict(e.Content, &c); err != nil {
		return content{}, fmt.Errorf("content is damaged: %w", err)
	}
	if c.Next < First {
		return content{}, fmt.Errorf("next is %d: want at least %d", c.Next, First)
	}
	if slices.Contains(c.Identities, nil) {
		return content{}, errors.New("content is damaged: an identity is null")
	}
	return c, nil
}

func strict(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("something follows the end")
	}
	return nil
}

// save writes all identities, and the counter with room to spare. Precondition:
// mu is held.
func (a *Allocator) save() error {
	reserved := a.reserved
	if a.next > reserved || reserved-a.next < reserveAhead/2 {
		reserved = a.next + min(reserveAhead, ^uint64(0)-a.next)
	}
	c := content{Next: reserved, Identities: make([]*state.Identity, 0, len(a.byKey))}
	for _, row := range a.byKey {
		c.Identities = append(c.Identities, row)
	}
	slices.SortFunc(c.Identities, func(x, y *state.Identity) int { return cmp.Compare(x.ID, y.ID) })
	data, err := encode(c)
	if err != nil {
		return err
	}
	if err := replace(a.path, data); err != nil {
		return fmt.Errorf("save identities: %w", err)
	}
	a.reserved = reserved
	return nil
}

// replace writes data aside, makes it durable and renames it into place. What a
// crash leaves aside, the next call overwrites.
func replace(path string, data []byte) (err error) {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
