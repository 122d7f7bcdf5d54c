package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// maxBody is the size of a request in bytes: a trace and its escapes.
const maxBody = 2 * maxTrace

// Catalogue is what a page starts with.
type Catalogue struct {
	MaxPackets int      `json:"max_packets"`
	MaxSenders int      `json:"max_senders"`
	Presets    []Preset `json:"presets"`
}

// Handler answers GET with a Catalogue and POST of a Request with a Result. It reads nothing else and changes nothing.
func Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodGet, http.MethodHead:
			answer(w, http.StatusOK, Catalogue{MaxPackets, MaxSenders, Presets()})
		case http.MethodPost:
			post(w, r)
		default:
			w.Header().Set("Allow", "GET, HEAD, POST")
			fail(w, http.StatusMethodNotAllowed, fmt.Errorf("sandbox: %.20q is not possible; use GET or POST", r.Method))
		}
	})
}

func post(w http.ResponseWriter, r *http.Request) {
	var asked Request
	from := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	from.DisallowUnknownFields()
	err := from.Decode(&asked)
	if err == nil {
		if _, more := from.Token(); more != io.EOF {
			err = errors.New("there is more than one JSON document; send one")
		}
	}
	if err != nil {
		status := http.StatusBadRequest
		if errors.As(err, new(*http.MaxBytesError)) {
			status = http.StatusRequestEntityTooLarge
		}
		fail(w, status, fmt.Errorf("sandbox: %w", err))
		return
	}
	result, err := Run(asked)
	if err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("sandbox: %w", err))
		return
	}
	answer(w, http.StatusOK, result)
}

func fail(w http.ResponseWriter, status int, err error) {
	answer(w, status, struct {
		Error    string `json:"error"`
		ExitCode int    `json:"exit_code"` // as of the commands: bad input
	}{err.Error(), 1})
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client has gone
}
