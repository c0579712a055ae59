// Command admission evaluates the CEL expressions of a ValidatingAdmissionPolicy as an API server does:
// with cel-go, the options of its environment, and the variables of the policy. It reads a policy's spec and
// the requests from standard input, and writes for each request the result of each validation: "true",
// "false" or the text of an error.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"

	"github.com/google/cel-go/cel"
)

type expression struct {
	Name       string `json:"name"`
	Expression string `json:"expression"`
}

type input struct {
	Variables   []expression     `json:"variables"`
	Validations []expression     `json:"validations"`
	Requests    []map[string]any `json:"requests"` // activations with "object", "oldObject" and "request"
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	var in input
	decoder := json.NewDecoder(os.Stdin)
	decoder.UseNumber()
	if err := decoder.Decode(&in); err != nil {
		return err
	}
	env, err := cel.NewEnv(
		cel.EagerlyValidateDeclarations(true),
		cel.HomogeneousAggregateLiterals(),
		cel.CrossTypeNumericComparisons(true),
		cel.OptionalTypes(),
		cel.Variable("object", cel.DynType),
		cel.Variable("oldObject", cel.DynType),
		cel.Variable("request", cel.DynType),
		cel.Variable("variables", cel.DynType),
	)
	if err != nil {
		return err
	}
	variables, err := compile(env, in.Variables)
	if err != nil {
		return err
	}
	validations, err := compile(env, in.Validations)
	if err != nil {
		return err
	}
	results := make([][]string, 0, len(in.Requests))
	for _, request := range in.Requests {
		found := map[string]any{}
		activation := map[string]any{"variables": found}
		for name, value := range request {
			activation[name] = numbers(value)
		}
		for i, program := range variables {
			value, _, err := program.Eval(activation)
			if err != nil {
				return fmt.Errorf("variable %s: %w", in.Variables[i].Name, err)
			}
			found[in.Variables[i].Name] = value
		}
		texts := []string{}
		for _, program := range validations {
			value, _, err := program.Eval(activation)
			if err != nil {
				texts = append(texts, err.Error())
			} else {
				texts = append(texts, fmt.Sprint(value.Value()))
			}
		}
		results = append(results, texts)
	}
	return json.NewEncoder(os.Stdout).Encode(results)
}

func compile(env *cel.Env, expressions []expression) ([]cel.Program, error) {
	programs := make([]cel.Program, 0, len(expressions))
	for _, expression := range expressions {
		checked, issues := env.Compile(expression.Expression)
		if issues.Err() != nil {
			return nil, fmt.Errorf("%s: %w", expression.Expression, issues.Err())
		}
		program, err := env.Program(checked)
		if err != nil {
			return nil, err
		}
		programs = append(programs, program)
	}
	return programs, nil
}

// numbers converts the numbers of a JSON value like the API server: integers to int64, others to float64.
func numbers(value any) any {
	switch value := value.(type) {
	case json.Number:
		if integer, err := value.Int64(); err == nil && !bytes.ContainsAny([]byte(value), ".eE") {
			return integer
		}
		number, _ := value.Float64()
		return number
	case []any:
		for i := range value {
			value[i] = numbers(value[i])
		}
	case map[string]any:
		for key := range value {
			value[key] = numbers(value[key])
		}
	}
	return value
}
