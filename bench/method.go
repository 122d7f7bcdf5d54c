package main

// How suites measure, for readers of their tables.
const (
	programMethod = "Programs run by `BPF_PROG_TEST_RUN`. The empty program shows the cost of the test run itself. Time is the CPU time\n" +
		"of the thread. `x clock` is a ratio to a program that reads the clock, which every limiter must do; `x empty`\n" +
		"is a ratio to the empty program. Where each packet has another address, a program in front of the measured\n" +
		"one takes it from a list in random order. The cost of that program is subtracted."

	trafficMethod = "A sender sends small UDP packets over a veth pair through one limiter after another. The cost of a limiter is the\n" +
		"time of a packet minus its time without a limiter in the same round. It is negative where a dropped packet skips\n" +
		"the rest of its path."

	instructionsMethod = "The same as [the suite traffic](traffic.md), in a virtual machine whose clock counts instructions. These figures\n" +
		"have no noise, and say nothing about caches."

	accuracyMethod = "A sender offers more than the rate. A program behind the limiter counts the bytes of the frames that arrive. A share\n" +
		"is that count over a window of time, divided by what the rate allows in it. The windows begin after the first\n" +
		"burst."

	queueMethod = "A router with the limiter on its far device forwards TCP between two namespaces. The path back has a delay, so that a\n" +
		"round trip takes 20 ms. All of it runs in a virtual machine whose clock counts instructions: only the limiter adds\n" +
		"delay to a packet.\n\n" +
		"- TCP is Cubic, starts with the window of the path, and is measured after a while. \"ECN\" means that it negotiates\n" +
		"  ECN. \"sparse first\" is `--order sparse-first`.\n" +
		"- A goodput of 100 % is the payload of full frames at the rate. A bucket of 300 ms can add up to 5 % in the 6 s of\n" +
		"  a measurement.\n" +
		"- \"lost\" are segments that did not arrive. \"retransmitted per MB\" are segments per MB of payload. On the limiter's\n" +
		"  host, TCP learns of a drop immediately and sends that segment later instead.\n" +
		"- \"request\" is the time until the answer to a request of 64 bytes on its own connection.\n" +
		"- Gaps are the times between departing packets at an offered load of twice the rate, divided by the time of a packet\n" +
		"  at the rate. A gap of 1 is ideal.\n" +
		"- Quartiles are over parts of the measurement."

	poolsMethod = "- Three senders go through a router with the limiter, as in [the suite queue](queue.md): TCP with Cubic, TCP with BBR,\n" +
		"  and UDP that sends twice the rate. Each has its own connection and destination. Parts are of the bytes that arrive\n" +
		"  in 3 s. Without delay, they are measured on this machine; else in a virtual machine whose clock counts instructions.\n" +
		"- Instructions are measured as in [the suite instructions](instructions.md). \"share flow\" is the `share` of the lowest\n" +
		"  pool, or of the rule if there is no pool. \"share member\" is that of all pools.\n" +
		"- HTB is an oracle for trees: 100 subscribers, 25 in each of four access points, share an uplink of 20mbit. Guarantees\n" +
		"  and rates are `rate` and `ceil` of classes; weights are quanta. All send UDP, each its own rate, through shapectl and\n" +
		"  through HTB at the same time, in that virtual machine. A difference is that of the bytes of a subscriber in 20 s.\n" +
		"  HTB divides by subscriber what the uplink has beyond the guarantees, and shapectl by access point; under these loads\n" +
		"  that is the same."

	hooksMethod = "All devices are veth devices in one network namespace. For the time of a command, each has one rule in each direction.\n" +
		"For memory and for `serve`, each has two. The new devices get one rule in each direction; their time begins\n" +
		"before the first one is created, and ends when `shapectl serve` reports the last rule."
)
