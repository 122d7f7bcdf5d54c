package plain

import "strings"

// Similar is the one of words that a misspelt word is most like: one with few other letters,
// or else the only one that begins so. It is "" if there is none.
func Similar(word string, words []string) string {
	const longest = 64
	if len(word) < 2 || len(word) > longest {
		return ""
	}
	word = strings.ToLower(word)
	best, least := "", max(1, len(word)/3)+1
	var begin []string
	for _, w := range words {
		if d := distance(word, w); d < least {
			best, least = w, d
		}
		if strings.HasPrefix(w, word) {
			begin = append(begin, w)
		}
	}
	if best == "" && len(begin) == 1 {
		return begin[0]
	}
	return best
}

// distance is how many letters to insert, delete or replace, or neighbours to
// swap, turn one word into another.
func distance(a, b string) int {
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
