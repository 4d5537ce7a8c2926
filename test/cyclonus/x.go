package main

import (
	"fmt"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
)
func main() {
	cs := generator.NewTestCaseGenerator(true, "10.244.2.5", []string{"x","y","z"}, nil, nil).GenerateAllTestCases()
	steps := 0
	for _, c := range cs { steps += len(c.Steps) }
	fmt.Println(len(cs), steps, matcher.NewPolicy(), probe.ConnectivityAllowed)
}
