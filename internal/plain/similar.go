package plain

import (
	"slices"
	"strings"
	"unicode"
)

// longest is the length of words beyond which none are compared.
const longest = 64

// Similar is the one of words that a misspelt word is most like: one with few other letters,
// or else the only one that begins so. It is "" if there is none.
func Similar(word string, words []string) string {
	if len(word) < 2 || len(word) > longest {
		return ""
	}
	word = strings.ToLower(word)
	best, least := "", max(1, len(word)/3)+1
	var begin []string
	for _, w := range words {
		lower := strings.ToLower(w)
		d := distance([]rune(word), []rune(lower))
		if d < least || d == least && common(word, lower) > common(word, strings.ToLower(best)) {
			best, least = w, d
		}
		if strings.HasPrefix(lower, word) {
			begin = append(begin, w)
		}
	}
	if best == "" && len(begin) == 1 {
		return begin[0]
	}
	return best
}

// SimilarName is Similar for a name that people gave. The only one that begins so wins, or
// the first of both directions. One that has other digits is somebody else's, if any name has the same digits.
func SimilarName(name string, names []string) string {
	var begin, ways, alike []string
	number := digitsOf(name)
	names = slices.Compact(slices.Sorted(slices.Values(names))) // several rules may have one name
	for _, n := range names {
		if strings.HasPrefix(strings.ToLower(n), strings.ToLower(name)) {
			begin = append(begin, n)
			if strings.HasPrefix(strings.ToLower(n), strings.ToLower(name)+" ") {
				ways = append(ways, n)
			}
		}
		if number != "" && digitsOf(n) == number {
			alike = append(alike, n)
		}
	}
	switch {
	case len(begin) == 1:
		return begin[0]
	case len(ways) == 1 || len(ways) == 2: // such as "AP1 down" and "AP1 up", for AP1, beside "AP10 down"
		return ways[0]
	case len(begin) > 1:
		return ""
	case alike != nil:
		names = alike
	}
	return Similar(name, names)
}

func digitsOf(s string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsDigit(c) {
			return c
		}
		return -1
	}, s)
}

// common is how many letters two words have in common at their beginning, in bytes.
func common(a, b string) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// distance is how many letters to insert, delete or replace, or neighbours to
// swap, turn one word into another.
func distance(a, b []rune) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		for j := range rows[i] {
			if i == 0 || j == 0 {
				rows[i][j] = i + j
				continue
			}
			least := min(rows[i-1][j], rows[i][j-1], rows[i-1][j-1]) + 1
			if a[i-1] == b[j-1] {
				least = min(least, rows[i-1][j-1])
			}
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				least = min(least, rows[i-2][j-2]+1)
			}
			rows[i][j] = least
		}
	}
	return rows[len(a)][len(b)]
}
