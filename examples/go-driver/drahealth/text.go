package drahealth

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// lineMax is what the kubelet shows of an error, and what it takes of a message [bytes].
	lineMax = 1024
	// summaryMax is for what the driver itself says [characters].
	summaryMax = 200
	// evidenceMax is for any other text that the agent gets [bytes].
	evidenceMax = 4096
)

// oneLine is valid UTF-8 without line breaks and other control characters, each row of them and of
// blanks one blank.
func oneLine(text string) string {
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(text, "\uFFFD"), func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r)
	}), " ")
}

// cutBytes is the beginning of a valid text, whole characters in at most so many bytes. One that was
// cut ends in "...".
func cutBytes(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	end := limit - len("...")
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "..."
}

// cutRunes is likewise, by the number of characters.
func cutRunes(text string, limit int) string {
	if utf8.RuneCountInString(text) <= limit {
		return text
	}
	return string([]rune(text)[:limit-len("...")]) + "..."
}
