package sandbox

const (
	millisecond = 1_000_000
	second      = 1000 * millisecond
)

// A Preset is a load with a limit that shows something.
type Preset struct {
	Name    string  `json:"name"`
	Title   string  `json:"title"`
	Why     string  `json:"why"`
	Request Request `json:"request"`
}

// requests are senders of requests of 1000 bytes: 8 kbit/s are one request a second.
func requests(senders ...Sender) []Sender {
	for i := range senders {
		senders[i].Bytes = 1000
	}
	return senders
}

// Presets are the cases of textbooks, then those of networks.
func Presets() []Preset {
	ten := func(more ...string) map[string]string {
		limit := map[string]string{"rate": "80kbit", "capacity": "10000b", "algorithm": "leaky"}
		for i := 0; i < len(more); i += 2 {
			limit[more[i]] = more[i+1]
		}
		return limit
	}
	return []Preset{
		{
			"five-a-second", "Five a second",
			"The bucket holds ten requests and leaks ten a second. Each request drains before the next one arrives, so all pass.",
			Request{Unit: "request", Limit: ten(), Senders: requests(Sender{Kind: "steady", PacketsPerSecond: 5, DurationNS: 4 * second})},
		},
		{
			"ten-after-idle", "Ten after a long idle",
			"After a long idle time, the bucket is empty. Ten requests at once fill it, so all pass; an eleventh would be dropped. The queue sends them one by one.",
			Request{Unit: "request", Limit: ten(), Senders: requests(Sender{Kind: "burst", StartNS: 3 * second, Packets: 10})},
		},
		{
			"three-times", "Three times the rate",
			"Thirty requests a second: the first ones fill the bucket. From then on, one in three passes.",
			Request{Unit: "request", Limit: ten(), Senders: requests(Sender{Kind: "steady", PacketsPerSecond: 30, DurationNS: 3 * second})},
		},
		{
			"never-stops", "… with a penalty",
			"With the penalty 'fill', each excess request fills the bucket of the leaky meter. A sender that does not slow down gets nothing more through.",
			Request{Unit: "request", Limit: ten("penalty", "fill"), Senders: requests(Sender{Kind: "steady", PacketsPerSecond: 30, DurationNS: 3 * second})},
		},
		{
			"five-per-second", "Twenty in half a second",
			"Five a second, room for ten: 12 pass. Without counting the leak during the half second, you would expect 10.",
			Request{
				Unit: "request", Limit: map[string]string{"rate": "40kbit", "capacity": "10000b", "algorithm": "leaky"},
				Senders: requests(Sender{Kind: "steady", PacketsPerSecond: 40, DurationNS: second / 2}),
			},
		},
		{
			"idle-then-burst", "Idle, then 200",
			"200 requests in 100 ms, at a rate of 100 a second with room for 200: all pass. The queue paces them over two seconds.",
			Request{
				Unit: "request", Limit: map[string]string{"rate": "800kbit", "capacity": "200000b", "algorithm": "leaky"},
				Senders: requests(Sender{Kind: "burst", Packets: 1}, Sender{Kind: "steady", StartNS: 5 * second, PacketsPerSecond: 2000, DurationNS: second / 10}),
			},
		},
		{
			"download", "A download",
			"TCP sends faster until it loses a packet, then halves its window. The queue delays packets instead, so TCP loses fewer of them.",
			Request{
				Limit:   map[string]string{"rate": "5mbit", "capacity": "64kb", "queue": "50ms"},
				Senders: []Sender{{Name: "download", Kind: "tcp", Bytes: 1514, PacketsPerSecond: 8000, RTTNS: 30 * millisecond, DurationNS: 5 * second}},
			},
		},
		{
			"call-and-download", "A video call beside a download",
			"The call sends little. With sparse-first its packets leave the queue at once. With fifo they wait behind those of the download, for up to 100 ms.",
			Request{
				Limit: map[string]string{"rate": "4mbit", "capacity": "16kb", "queue": "100ms", "order": "sparse-first"},
				Senders: []Sender{
					{Name: "call", Kind: "steady", Bytes: 214, PacketsPerSecond: 50, DurationNS: 4 * second},
					{Name: "download", Kind: "tcp", Bytes: 1514, PacketsPerSecond: 8000, RTTNS: 40 * millisecond, StartNS: second, DurationNS: 3 * second},
				},
			},
		},
		{
			"dns-flood", "A DNS flood",
			"Each host has a bucket, so the flood fills only its own: the client loses nothing. With one bucket for all, the client would lose most of its queries.",
			Request{
				Direction: "ingress",
				Limit:     map[string]string{"rate": "64kbit", "capacity": "4kb", "each": "host", "penalty": "fill"},
				Senders: []Sender{
					{Name: "client", Kind: "random", Bytes: 90, PacketsPerSecond: 20, DurationNS: 4 * second},
					{Name: "flood", Kind: "random", Bytes: 90, PacketsPerSecond: 1000, StartNS: second, DurationNS: 2 * second},
				},
			},
		},
		{
			"pages", "Pages with pauses",
			"Each page is a burst of 150 kB, then nothing happens for a second. With a burst of that size, pages arrive at full speed although the rate is low.",
			Request{
				Limit:   map[string]string{"rate": "2mbit", "capacity": "128kb"},
				Senders: []Sender{{Name: "pages", Kind: "on-off", Bytes: 1514, PacketsPerSecond: 2000, OnNS: 50 * millisecond, OffNS: second, DurationNS: 5 * second}},
			},
		},
	}
}
