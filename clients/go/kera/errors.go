package kera

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kerav1 "kera.example/client/kera/v1"
)

const (
	codeNotLeader       = "not_leader"
	codeNotOwner        = "not_owner"
	codeUnknownStream   = "unknown_stream"
	codeUnavailable     = "unavailable"
	codeOutOfSequence   = "out_of_sequence"
	codeDataLost        = "data_lost"
	codeCorruptChunk    = "corrupt_chunk"
	codeInvalidArgument = "invalid_argument"
	codeRecordTooLarge  = "record_too_large"
	codeSchemaMismatch  = "schema_mismatch"
	codeInternal        = "internal"
)

// What the guide's table says of a code, whatever `retriable` says.
var (
	triedAgain = set(
		codeNotOwner, codeUnavailable, "uncertain", "not_persisted", "not_replicated", codeOutOfSequence, "session_lost",
		"arena_full", "disk_full", "too_few_backups", "recovering",
	)
	final = set(
		"producer_fenced", "invalid_cursor", "streamlet_out_of_range", codeDataLost, codeInvalidArgument, codeCorruptChunk,
		codeSchemaMismatch, codeRecordTooLarge,
	)
)

func set(names ...string) map[string]bool {
	all := make(map[string]bool, len(names))
	for _, name := range names {
		all[name] = true
	}
	return all
}

// Error is what a daemon answers, or what this client has found. Compare its Code.
type Error struct {
	Code    string
	Message string
	// Retriable as the daemon has said; the code counts more.
	Retriable bool
	// Attributes by name; values are JSON.
	Attributes map[string]string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s (%s)", e.Message, e.Code)
}

// Attribute reads a value into what to points to; ok is false if it is not there, or something else.
func (e *Error) Attribute(name string, to any) (ok bool) {
	text, ok := e.Attributes[name]
	return ok && json.Unmarshal([]byte(text), to) == nil
}

// CodeOf is the code of an Error within err; empty: there is none.
func CodeOf(err error) string {
	var known *Error
	if errors.As(err, &known) {
		return known.Code
	}
	return ""
}

// temporary says whether the same may succeed later. An unknown stream is asked about elsewhere.
func temporary(err error) bool {
	var known *Error
	switch {
	case !errors.As(err, &known) || final[known.Code]:
		return false
	default:
		return triedAgain[known.Code] || known.Retriable
	}
}

func errorOf(message *kerav1.Error) error {
	if message == nil {
		return nil
	}
	return &Error{
		Code:       message.GetCode(),
		Message:    message.GetMessage(),
		Retriable:  message.GetRetriable(),
		Attributes: message.GetAttributes(),
	}
}

// errorOfCall is what a failed call means: what its trailer has, or what gRPC says.
func errorOfCall(err error, trailer metadata.MD) error {
	if err == nil {
		return nil
	}
	if values := trailer.Get("kera-error-bin"); len(values) > 0 {
		var message kerav1.Error
		if proto.Unmarshal([]byte(values[0]), &message) == nil {
			return errorOf(&message)
		}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	said := status.Convert(err)
	switch said.Code() {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted, codes.Aborted:
		return &Error{Code: codeUnavailable, Message: said.Message(), Retriable: true}
	case codes.Unimplemented:
		return &Error{Code: codeInternal, Message: "the server does not have this call, so it is not a KerA daemon, or not the intended one: " + said.Message()}
	default:
		return &Error{Code: codeInternal, Message: fmt.Sprintf("%s: %s", strings.ToLower(said.Code().String()), said.Message())}
	}
}

// asUnavailable is an error for who waited for an answer: that none has come in time is as good as a lost connection.
func asUnavailable(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return &Error{Code: codeUnavailable, Message: "no answer has come in time", Retriable: true}
	}
	return err
}
