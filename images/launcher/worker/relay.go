package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	connectTimeout = 10 * time.Second // the address of a launcher that was deleted does not answer
	idleTimeout    = 2 * time.Minute
	longestSilence = 2 * idleTimeout // of an attempt in which nothing is transferred: its parts have timeouts
	firstPause     = 50 * time.Millisecond
	lastPause      = 2 * time.Second
	bufferSize     = 1 << 18
	reasonLength   = 500
)

// relay is the server in the launcher's pod (kfp_gpuquota/dsl/launcher/relay.py). Its address, token and certificate
// authority are files, which are read again for each request, because a launcher that was replaced has others. Nothing is
// sent before the server has proved its certificate.
type relay struct {
	folder   string
	patience time.Duration
	client   *http.Client
	trusted  string // the authority of client
}

// work is what the relay answers to a worker.
type work struct {
	Argv    []string
	Inputs  []string // paths
	Outputs []string // folders
	// Result is the path of KFP's output file, and Artifacts are the paths of the output artifacts by their URIs.
	Result    string
	Artifacts map[string]string
}

// finalError is one that no further attempt can mend.
type finalError struct{ error }

func (f finalError) Unwrap() error { return f.error }

// refusedError is an answer of the relay; status is that of HTTP.
type refusedError struct {
	request string
	status  int
	reason  string
}

func (r refusedError) Error() string { return fmt.Sprintf("%s: %d %s", r.request, r.status, r.reason) }

// body opens the content of a request for each attempt, and returns its length.
type body func() (io.ReadCloser, int64, error)

func newRelay(folder string, patience time.Duration) *relay {
	return &relay{folder: folder, patience: patience}
}

func (r *relay) work(worker string) (*work, error) {
	found := &work{}
	return found, r.request(http.MethodGet, "/work?worker="+url.QueryEscape(worker), nil, decodedInto(found))
}

// list returns the files of an input.
func (r *relay) list(path string) ([]listed, error) {
	var found []listed
	return found, r.request(http.MethodGet, "/list?path="+url.QueryEscape(path), nil, decodedInto(&found))
}

// download calls receive with the content of a file of an input.
func (r *relay) download(path string, receive func(io.Reader) error) error {
	return r.request(http.MethodGet, "/file?path="+url.QueryEscape(path), nil, receive)
}

// upload sends a file of an output.
func (r *relay) upload(path string, mode os.FileMode, content body) error {
	query := fmt.Sprintf("/file?path=%s&mode=%o", url.QueryEscape(path), mode)
	return r.request(http.MethodPut, query, content, ignored)
}

// complete returns whether the relay has all of these files; the relay of a replaced launcher has not.
func (r *relay) complete(worker string, files []sized) (bool, error) {
	content, err := json.Marshal(files)
	if err != nil {
		return false, err
	}
	err = r.request(http.MethodPut, "/complete?worker="+url.QueryEscape(worker), whole(content), ignored)
	var refused refusedError
	if errors.As(err, &refused) && refused.status == http.StatusConflict {
		return false, nil
	}
	return err == nil, err
}

// request repeats a request while the relay does not answer.
func (r *relay) request(method, path string, content body, receive func(io.Reader) error) error {
	return r.repeat(func() error { return r.attempt(method, path, content, receive) })
}

// repeat repeats an attempt, with growing pauses, for as long as the relay may not answer.
func (r *relay) repeat(attempt func() error) error {
	last, pause := time.Now().Add(r.patience), firstPause
	for {
		began := time.Now()
		err := attempt()
		var final finalError
		if err == nil || errors.As(err, &final) {
			return err
		}
		if time.Since(began) > longestSilence { // it has transferred a part, so the relay did answer
			last = time.Now().Add(r.patience)
		}
		if time.Now().Add(pause).After(last) {
			return fmt.Errorf("the step's launcher does not answer: %w", err)
		}
		time.Sleep(pause)
		pause = min(2*pause, lastPause)
	}
}

func (r *relay) attempt(method, path string, content body, receive func(io.Reader) error) error {
	address, err := r.setting("url")
	if err != nil {
		return err
	}
	token, err := r.setting("token")
	if err != nil {
		return err
	}
	if err := r.trust(); err != nil {
		return err
	}
	server, err := url.Parse(address)
	if err != nil {
		return err
	}
	// whatever the address says, the connection is TLS
	request, err := http.NewRequest(method, "https://"+server.Host+path, nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	if content != nil {
		source, size, err := content()
		if err != nil {
			return finalError{err}
		}
		defer source.Close()
		request.Body, request.ContentLength = source, size
		if size == 0 {
			request.Body = http.NoBody
		}
	}
	answer, err := r.client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	switch {
	case answer.StatusCode == http.StatusServiceUnavailable:
		return errors.New("it cannot accept the request now")
	case answer.StatusCode >= http.StatusMultipleChoices:
		reason, _ := io.ReadAll(io.LimitReader(answer.Body, reasonLength))
		return finalError{refusedError{method + " " + path, answer.StatusCode, string(reason)}}
	}
	return receive(answer.Body)
}

// trust makes the client of the relay's present authority.
func (r *relay) trust() error {
	authority, err := r.setting("ca.crt")
	if err != nil || authority == r.trusted {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(authority)) {
		return errors.New("ca.crt has no certificate")
	}
	if r.client != nil {
		r.client.CloseIdleConnections()
	}
	dialer := &net.Dialer{Timeout: connectTimeout}
	transport := &http.Transport{ // without a proxy: the address is that of a pod
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			connection, err := dialer.DialContext(ctx, network, address)
			return &timedConnection{connection}, err
		},
		TLSClientConfig:     &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: connectTimeout,
		IdleConnTimeout:     idleTimeout / 4,
		DisableCompression:  true,
		ReadBufferSize:      bufferSize,
		WriteBufferSize:     bufferSize,
	}
	r.client, r.trusted = &http.Client{Transport: transport}, authority
	return nil
}

func (r *relay) setting(name string) (string, error) {
	content, err := os.ReadFile(filepath.Join(r.folder, name))
	return strings.TrimSpace(string(content)), err
}

// timedConnection fails where nothing is sent or received for idleTimeout.
type timedConnection struct{ net.Conn }

func (t *timedConnection) Read(buffer []byte) (int, error) {
	_ = t.SetReadDeadline(time.Now().Add(idleTimeout))
	return t.Conn.Read(buffer)
}

// Write extends the time to read, too: the HTTP client awaits the answer while it sends the request.
func (t *timedConnection) Write(buffer []byte) (int, error) {
	_ = t.SetDeadline(time.Now().Add(idleTimeout))
	return t.Conn.Write(buffer)
}

func whole(content []byte) body {
	return func() (io.ReadCloser, int64, error) {
		return io.NopCloser(bytes.NewReader(content)), int64(len(content)), nil
	}
}

func decodedInto(target any) func(io.Reader) error {
	return func(content io.Reader) error { return json.NewDecoder(content).Decode(target) }
}

func ignored(content io.Reader) error {
	_, err := io.Copy(io.Discard, content)
	return err
}
