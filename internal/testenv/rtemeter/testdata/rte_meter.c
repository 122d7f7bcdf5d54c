/*
 * Runs DPDK's meters in virtual time. It reads from stdin, in decimal:
 *
 *	KIND AWARE HZ CIR CBS RATE BURST PACKETS	KIND: srtcm (which has no RATE), trtcm or rfc4115; rates in bytes/s
 *	TIME BYTES COLOUR				of each packet: TIME in cycles, COLOUR 0 to 2
 *
 * After the first line it writes the period of CIR in cycles, its bytes in a period, and the same of RATE; after the last
 * packet a line with a digit for each colour. Then the next trace may follow.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_meter.h>

static uint64_t hz;

/* In place of that of librte_eal, which measures the clock. */
uint64_t rte_get_tsc_hz(void);
uint64_t rte_get_tsc_hz(void)
{
	return hz;
}

static void check(int err)
{
	if (err) {
		fprintf(stderr, "DPDK refuses the parameters: %s\n", strerror(-err));
		exit(1);
	}
}

static void write_periods(uint64_t cir_period, uint64_t cir_bytes, uint64_t period, uint64_t bytes)
{
	printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", cir_period, cir_bytes, period, bytes);
	fflush(stdout);
}

/* The colours of all packets. name is in the names of DPDK's functions. */
#define COLOUR_PACKETS(meter, profile, name)                                                                                   \
	for (; packets; packets--) {                                                                                           \
		uint64_t time;                                                                                                 \
		uint32_t bytes;                                                                                                \
		unsigned int in;                                                                                               \
                                                                                                                               \
		if (scanf("%" SCNu64 " %" SCNu32 " %u", &time, &bytes, &in) != 3) {                                            \
			fprintf(stderr, "a packet is missing or malformed\n");                                                 \
			exit(1);                                                                                               \
		}                                                                                                              \
		putchar('0' + (aware ? rte_meter_##name##_color_aware_check(meter, profile, time, bytes, in) :                 \
				       rte_meter_##name##_color_blind_check(meter, profile, time, bytes)));                    \
	}

/* A meter begins with the cycles of the machine; here time begins at 0. */
static void run_srtcm(int aware, struct rte_meter_srtcm_params params, uint64_t packets)
{
	struct rte_meter_srtcm_profile p;
	struct rte_meter_srtcm m;

	check(rte_meter_srtcm_profile_config(&p, &params));
	check(rte_meter_srtcm_config(&m, &p));
	m.time = 0;
	write_periods(p.cir_period, p.cir_bytes_per_period, p.cir_period, p.cir_bytes_per_period);
	COLOUR_PACKETS(&m, &p, srtcm)
}

static void run_trtcm(int aware, struct rte_meter_trtcm_params params, uint64_t packets)
{
	struct rte_meter_trtcm_profile p;
	struct rte_meter_trtcm m;

	check(rte_meter_trtcm_profile_config(&p, &params));
	check(rte_meter_trtcm_config(&m, &p));
	m.time_tc = m.time_tp = 0;
	write_periods(p.cir_period, p.cir_bytes_per_period, p.pir_period, p.pir_bytes_per_period);
	COLOUR_PACKETS(&m, &p, trtcm)
}

static void run_rfc4115(int aware, struct rte_meter_trtcm_rfc4115_params params, uint64_t packets)
{
	struct rte_meter_trtcm_rfc4115_profile p;
	struct rte_meter_trtcm_rfc4115 m;

	check(rte_meter_trtcm_rfc4115_profile_config(&p, &params));
	check(rte_meter_trtcm_rfc4115_config(&m, &p));
	m.time_tc = m.time_te = 0;
	write_periods(p.cir_period, p.cir_bytes_per_period, p.eir_period, p.eir_bytes_per_period);
	COLOUR_PACKETS(&m, &p, trtcm_rfc4115)
}

int main(void)
{
	char kind[16];
	int aware;
	uint64_t cir, cbs, rate, burst, packets;

	while (scanf("%15s %d %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, kind, &aware, &hz, &cir,
		     &cbs, &rate, &burst, &packets) == 8) {
		if (!strcmp(kind, "srtcm"))
			run_srtcm(aware, (struct rte_meter_srtcm_params){ .cir = cir, .cbs = cbs, .ebs = burst }, packets);
		else if (!strcmp(kind, "trtcm"))
			run_trtcm(aware, (struct rte_meter_trtcm_params){ .cir = cir, .cbs = cbs, .pir = rate, .pbs = burst }, packets);
		else
			run_rfc4115(aware, (struct rte_meter_trtcm_rfc4115_params){ .cir = cir, .cbs = cbs, .eir = rate, .ebs = burst },
				    packets);
		putchar('\n');
		fflush(stdout);
	}
	return 0;
}
