package kera

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	kerav1 "kera.example/client/kera/v1"
)

// Positions is how far a stream was read.
type Positions struct {
	Stream   string       `json:"stream"`
	StreamID uint64       `json:"stream_id"`
	Places   []EntryPlace `json:"places"`
}

// EntryPlace is how far an entry of a streamlet was read.
type EntryPlace struct {
	StreamletID uint32 `json:"streamlet"`
	Entry       uint32 `json:"entry"`
	Place
}

// Place is one in an entry, as a broker has said it. Group 0 is before the oldest record.
type Place struct {
	Group    uint64 `json:"group"`
	Segment  uint32 `json:"segment"`
	Position uint32 `json:"position"`
}

func (p Place) String() string {
	return fmt.Sprintf("%d/%d+%d", p.Group, p.Segment, p.Position)
}

func placeOf(cursor *kerav1.Cursor) Place {
	return Place{cursor.GetGroupId(), cursor.GetSegmentId(), cursor.GetPosition()}
}

// SaveJSON replaces a file as a whole: after a crash it has what it had before, or what it has now.
func SaveJSON(path string, value any) (err error) {
	data, err := json.MarshalIndent(value, "", " ")
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	if _, err = file.Write(append(data, '\n')); err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err = os.Rename(file.Name(), path); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// syncFolder has the file system keep that a file has a new name.
func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}

// LoadJSON reads a file into what value points to; found is false if there is none.
func LoadJSON(path string, value any) (found bool, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(data, value); err != nil {
		return false, fmt.Errorf("%s is damaged, or something else than positions: %w", path, err)
	}
	return true, nil
}
