package drahealth_test

func Example_driver() {}
