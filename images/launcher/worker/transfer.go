package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

const uploadRounds = 5

// listed is a file of an input: its path relative to the input ("": the input itself), its size and its mode.
type listed struct {
	path string
	size int64
	mode os.FileMode
}

func (l *listed) UnmarshalJSON(content []byte) error {
	return json.Unmarshal(content, &[]any{&l.path, &l.size, &l.mode})
}

// sized is a file of an output.
type sized struct {
	path string
	size int64
}

func (s sized) MarshalJSON() ([]byte, error) { return json.Marshal([]any{s.path, s.size}) }

// fetch downloads every input to the path where the step's command reads it. An input that exists is on a shared volume.
func fetch(relay *relay, inputs []string) error {
	// before any is downloaded: an input within another one creates that one's folder
	missing := slices.DeleteFunc(slices.Clone(inputs), func(root string) bool {
		_, err := os.Stat(root)
		return err == nil
	})
	for _, root := range missing {
		files, err := relay.list(root)
		if err != nil {
			return err
		}
		for _, one := range files {
			if err := fetchFile(relay, filepath.Join(root, one.path), one); err != nil {
				return err
			}
		}
	}
	return nil
}

func fetchFile(relay *relay, path string, about listed) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return fmt.Errorf("the input %s cannot be written: %w", path, err)
	}
	err := relay.download(path, func(content io.Reader) error { return about.receive(path, content) })
	if err != nil {
		return fmt.Errorf("the input %s was not received: %w", path, err)
	}
	return nil
}

// receive writes the file as a whole, or not at all. What the disk refuses is final.
func (l listed) receive(path string, content io.Reader) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".*.part")
	if err != nil {
		return finalError{err}
	}
	defer os.Remove(file.Name()) // unless it has become the file
	written, err := io.CopyBuffer(onlyWriter{file}, content, make([]byte, bufferSize))
	if failed := file.Close(); failed != nil && err == nil {
		err = finalError{failed}
	}
	if err == nil && written != l.size {
		err = fmt.Errorf("%s ended after %d of %d bytes", path, written, l.size)
	}
	if err != nil {
		return err
	}
	if err := os.Chmod(file.Name(), l.mode); err != nil {
		return finalError{err}
	}
	if err := os.Rename(file.Name(), path); err != nil {
		return finalError{err}
	}
	return nil
}

// onlyWriter marks what the disk refuses, which no further attempt mends, and hides the file's own, smaller, buffer.
type onlyWriter struct{ file *os.File }

func (w onlyWriter) Write(content []byte) (int, error) {
	count, err := w.file.Write(content)
	if err != nil {
		err = finalError{err}
	}
	return count, err
}

// send uploads all files that the command has written to its output folders, and the artifacts that it has written
// elsewhere, by the paths that they are sent to.
func send(relay *relay, worker string, folders []string, elsewhere map[string]string) error {
	for range uploadRounds {
		files := []sized{} // an empty list is a list
		for _, folder := range folders {
			found, err := outputFiles(folder)
			if err != nil {
				return err
			}
			for _, path := range found {
				if replaced(path, elsewhere) {
					continue
				}
				size, err := sendFile(relay, path, path)
				if err != nil {
					return fmt.Errorf("the output %s was not sent: %w", path, err)
				}
				files = append(files, sized{path, size})
			}
		}
		for _, target := range slices.Sorted(maps.Keys(elsewhere)) {
			custom := elsewhere[target]
			found, err := outputFiles(custom)
			if err != nil {
				return err
			}
			for _, path := range found {
				sent := target + strings.TrimPrefix(path, custom)
				size, err := sendFile(relay, sent, path)
				if err != nil {
					return fmt.Errorf("the output %s was not sent: %w", path, err)
				}
				files = append(files, sized{sent, size})
			}
		}
		if done, err := relay.complete(worker, files); done || err != nil {
			return err
		}
	}
	return fmt.Errorf("the step's launcher was replaced %d times during the upload of the outputs", uploadRounds)
}

// replaced returns whether a file is what the command left at the own path of an artifact that it has elsewhere.
func replaced(path string, elsewhere map[string]string) bool {
	for target := range elsewhere {
		if path == target || strings.HasPrefix(path, target+"/") {
			return true
		}
	}
	return false
}

// withCustomPaths returns the paths of the artifacts that the command has left elsewhere (KFP's custom_path), by the
// artifacts' own paths, to which they are sent. KFP's output file no longer names the custom paths then, which are
// nothing in the launcher's pod. One without a file stays named, so that the launcher refuses it.
func withCustomPaths(work *work) (map[string]string, error) {
	elsewhere := map[string]string{}
	content, err := os.ReadFile(work.Result)
	if err != nil {
		return elsewhere, nil // a command that does not write it
	}
	result := map[string]any{}
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.UseNumber()
	if decoder.Decode(&result) != nil {
		return elsewhere, nil // KFP reads the file, and says what is wrong with it
	}
	kinds, _ := result["artifacts"].(map[string]any)
	for _, kind := range kinds {
		listed, _ := kind.(map[string]any)
		artifacts, _ := listed["artifacts"].([]any)
		for _, each := range artifacts {
			artifact, _ := each.(map[string]any)
			uri, _ := artifact["uri"].(string)
			for _, field := range []string{"custom_path", "customPath"} {
				custom, _ := artifact[field].(string)
				own := work.Artifacts[uri]
				inside := func(folder string) bool { return strings.HasPrefix(custom, folder+"/") } // it is sent as it is
				if _, err := os.Stat(custom); own == "" || err != nil || slices.ContainsFunc(work.Outputs, inside) {
					continue
				}
				elsewhere[own] = filepath.Clean(custom)
				delete(artifact, field)
			}
		}
	}
	if len(elsewhere) == 0 {
		return elsewhere, nil
	}
	if content, err = json.Marshal(result); err != nil {
		return nil, err
	}
	return elsewhere, os.WriteFile(work.Result, content, 0o666)
}

// sendFile returns the size of which a file was sent; one that grows meanwhile is sent as large as it was.
func sendFile(relay *relay, target, path string) (int64, error) {
	about, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	size := about.Size()
	err = relay.upload(target, about.Mode().Perm(), func() (io.ReadCloser, int64, error) {
		file, err := os.Open(path)
		if err != nil {
			return nil, 0, err
		}
		if now, err := file.Stat(); err == nil {
			size = now.Size()
		}
		return limited{io.LimitReader(file, size), file}, size, nil
	})
	return size, err
}

type limited struct {
	io.Reader
	io.Closer
}

// outputFiles returns all files below a folder, or the one file, sorted, also by links to folders in it. What cannot be sent is an error
// that names it.
func outputFiles(root string) ([]string, error) {
	real, err := filepath.EvalSymlinks(root)
	if os.IsNotExist(err) {
		return nil, nil // the command has removed it
	}
	if err != nil {
		return nil, err
	}
	if about, err := os.Stat(real); err == nil && about.Mode().IsRegular() {
		return []string{root}, nil
	}
	return filesBelow(root, real, []string{real})
}

// filesBelow returns the files below a folder. open are the real paths of the folders on the way to it, the last its own.
func filesBelow(folder, root string, open []string) ([]string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("the output %w", err)
	}
	var found []string
	for _, entry := range entries {
		path := filepath.Join(folder, entry.Name())
		about, err := os.Stat(path)
		switch {
		case err != nil:
			return nil, fmt.Errorf("the output %s is a link to nothing", path)
		case !utf8.ValidString(path):
			return nil, fmt.Errorf("the output %q has a name that is not UTF-8", path)
		case about.Mode().IsRegular():
			found = append(found, path)
		case !about.IsDir():
			return nil, fmt.Errorf("the output %s is no file", path)
		default:
			real, err := filepath.EvalSymlinks(path)
			switch {
			case err != nil:
				return nil, fmt.Errorf("the output %w", err)
			case !strings.HasPrefix(real, root+"/"):
				return nil, fmt.Errorf("the output %s is a link to a folder outside of it; copy the folder instead", path)
			case slices.Contains(open, real):
				return nil, fmt.Errorf("the output %s is a link to a folder that contains it", path)
			}
			inside, err := filesBelow(path, root, append(slices.Clone(open), real))
			if err != nil {
				return nil, err
			}
			found = append(found, inside...)
		}
	}
	return found, nil
}
