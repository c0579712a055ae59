package main

import (
	"fmt"
	"reflect"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
)

// Sink that reports each line of the kubelet's log with its values.
type logSink struct {
	out    *output
	name   string
	values []any
}

func (s *logSink) Init(logr.RuntimeInfo) {}

func (s *logSink) Enabled(level int) bool { return level <= verbosity }

func (s *logSink) Info(level int, message string, values ...any) { s.write(message, nil, values) }

func (s *logSink) Error(err error, message string, values ...any) {
	s.write(message, fields{"level": "error", "error": text(err)}, values)
}

func (s *logSink) WithValues(values ...any) logr.LogSink {
	return &logSink{out: s.out, name: s.name, values: append(append([]any{}, s.values...), values...)}
}

func (s *logSink) WithName(name string) logr.LogSink {
	return &logSink{out: s.out, name: s.name + "/" + name, values: s.values}
}

func (s *logSink) write(message string, line fields, values []any) {
	if line == nil {
		line = fields{"level": "info"}
	}
	line["event"], line["name"], line["message"] = "log", s.name, message
	named := fields{}
	all := append(append([]any{}, s.values...), values...)
	for i := 0; i+1 < len(all); i += 2 {
		named[fmt.Sprint(all[i])] = text(all[i+1])
	}
	line["values"] = named
	s.out.write(line)
}

// Return a value that JSON can hold: numbers and lists of texts as they are, messages as on the wire, all others as text.
func text(value any) any {
	switch value := value.(type) {
	case nil, bool, int, string, []string:
		return value
	case proto.Message:
		if reflect.ValueOf(value).IsNil() {
			return nil
		}
		wire, err := proto.Marshal(value)
		if err != nil {
			return err.Error()
		}
		return wire
	case error:
		return value.Error()
	default:
		return fmt.Sprint(value)
	}
}
