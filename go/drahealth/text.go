// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// lineMax is the kubelet's limit of an error and of a health message [bytes].
	lineMax = 1024
	// summaryMax limits the text of a ClassifiedError [characters].
	summaryMax = 200
	// evidenceMax limits any other text for the agent [bytes].
	evidenceMax = 4096
)

// oneLine returns valid UTF-8 in which each run of whitespace and control characters is one blank.
func oneLine(text string) string {
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(text, "\uFFFD"), func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r)
	}), " ")
}

// cutBytes cuts a valid text to at most limit bytes of whole characters; a cut text ends in "...".
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

// cutRunes cuts a text to at most limit characters; a cut text ends in "...".
func cutRunes(text string, limit int) string {
	if utf8.RuneCountInString(text) <= limit {
		return text
	}
	return string([]rune(text)[:limit-len("...")]) + "..."
}
