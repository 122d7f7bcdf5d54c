# costs.awk MEASURED COMMITTED: compares what packets and loading cost under each kernel with the committed figures. More
# than 1 % worse is an error. So is more than 1 % better: else the gain could be lost again unseen. With `-v update=1` it
# prints the new table, where figures within 1 % stay as they were. So many small losses add up to an error.
# MEASURED has a line "RELEASE FIGURE NAME" for each figure. COMMITTED has a row for each name, and a column for each kernel.

function series(release, part) {
	split(release, part, ".")
	return part[1] "." part[2]
}

BEGIN { FS = OFS = "\t" }

FNR == NR {
	if (!($1 in seen))
		releases[++kernels] = $1
	seen[$1]
	if (($3, series($1)) in is) {
		print "Linux " $1 ": " $3 ": measured twice"
		failed = 1
	}
	is[$3, series($1)] = $2
	name = $3
}

FNR != NR && FNR == 1 {
	for (i = 2; i <= NF; i++)
		committed[column[i] = series($i)] = $i
	next
}

FNR != NR {
	for (i = 2; i <= NF; i++)
		was[$1, column[i]] = $i
	if (rowsOf[$1]++) {
		print $1 ": committed twice"
		failed = 1
	}
	name = $1
}

!(name in known) {
	known[name]
	names[++rows] = name
}

END {
	heading = "Linux"
	for (k = 1; k <= kernels; k++) {
		heading = heading OFS releases[k]
		if (!(series(releases[k]) in committed) && !update)
			print "Linux " releases[k] " has no committed figures yet"
	}
	if (update)
		print heading
	for (r = 1; r <= rows; r++) {
		line = ""
		for (k = 1; k <= kernels; k++) {
			kernel = series(releases[k])
			old = was[names[r], kernel]
			new = is[names[r], kernel]
			more = old ? 100 * (new / old - 1) : 100
			if (more >= -1 && more <= 1)
				new = old
			else if (!update && kernel in committed) {
				under = committed[kernel] == releases[k] ? "" : " under " committed[kernel]
				printf "Linux %s: %s: was %d%s, is %d (%+.1f %%)\n", releases[k], names[r], old, under, new, more
				failed = 1
			}
			line = line OFS new
		}
		if (update && line ~ /[0-9]/)
			print names[r] line
	}
	exit failed
}
