package main

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// completeCmd prints a completion script, made from the commands themselves.
type completeCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help says how the script is used.
func (completeCmd) Help() string {
	return "bash: source <(sandlot completion bash)\n\nzsh: source <(sandlot completion zsh)\n\nfish: sandlot completion fish | source"
}

func (x *completeCmd) Run(k *kong.Context, s *streams) error {
	return writeCompletion(s.out, x.Shell, k.Model.Node)
}

// place is one command with what may follow it.
type place struct {
	path string // words below the program's name: "sandbox create"
	subs []word
	// flags of the command and of those above it, "--name" and "-n".
	flags []word
	own   int // how many of flags, at the end, are the command's own
	// takes are the flags among them whose value is the next word.
	takes []string
	// values of the first argument, when they are few and known.
	values []word
}

type word struct{ text, help string }

// places walks the commands, hidden ones left out.
func places(n *kong.Node, path string, above []*kong.Flag) []place {
	p := place{path: path}
	flags := slices.Concat(above, n.Flags)
	for i, f := range flags {
		if f.Hidden {
			continue
		}
		names := []string{"--" + f.Name}
		if f.Short != 0 {
			names = append(names, "-"+string(f.Short))
		}
		for _, name := range names {
			p.flags = append(p.flags, word{name, f.Help})
			if i >= len(above) {
				p.own++
			}
			if !f.IsBool() {
				p.takes = append(p.takes, name)
			}
		}
	}
	if len(n.Positional) > 0 {
		for _, v := range n.Positional[0].EnumSlice() {
			p.values = append(p.values, word{v, ""})
		}
	}
	all := []place{}
	for _, c := range n.Children {
		if c.Hidden {
			continue
		}
		p.subs = append(p.subs, word{c.Name, c.Help})
		all = append(all, places(c, strings.TrimSpace(path+" "+c.Name), flags)...)
	}
	return append([]place{p}, all...)
}

func writeCompletion(w io.Writer, shell string, root *kong.Node) error {
	all := places(root, "", nil)
	var b bytes.Buffer
	switch shell {
	case "bash":
		bashCompletion(&b, all)
	case "zsh":
		// zsh runs bash's script as it is.
		b.WriteString("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n")
		bashCompletion(&b, all)
	default:
		fishCompletion(&b, all)
	}
	_, err := w.Write(b.Bytes())
	return err
}

func texts(ws []word) string {
	out := make([]string, len(ws))
	for i, w := range ws {
		out[i] = w.text
	}
	return strings.Join(out, " ")
}

// bashCompletion finds the command that the line has come to, then offers what may follow it.
func bashCompletion(b *bytes.Buffer, all []place) {
	b.WriteString(`_sandlot() {
  local cur=${COMP_WORDS[COMP_CWORD]} at="" i=1 word
  while [ "$i" -lt "$COMP_CWORD" ]; do
    word=${COMP_WORDS[i]}
    if [ "$word" = "--" ]; then return; fi
    case "$at|$word" in
`)
	for _, p := range all {
		for _, name := range p.takes {
			fmt.Fprintf(b, "      %s) i=$((i + 1)) ;;\n", quoteShell(p.path+"|"+name))
		}
		for _, c := range p.subs {
			fmt.Fprintf(b, "      %s) at=%s ;;\n", quoteShell(p.path+"|"+c.text), quoteShell(strings.TrimSpace(p.path+" "+c.text)))
		}
	}
	b.WriteString("    esac\n    i=$((i + 1))\n  done\n")
	b.WriteString("  if [ \"$i\" -gt \"$COMP_CWORD\" ]; then return; fi # a flag's value\n")
	b.WriteString("  local words=\"\" flags=\"\"\n  case \"$at\" in\n")
	for _, p := range all {
		fmt.Fprintf(b, "    %s) words=%s flags=%s ;;\n", quoteShell(p.path), quoteShell(texts(slices.Concat(p.subs, p.values))), quoteShell(texts(p.flags)))
	}
	b.WriteString(`  esac
  case "$cur" in -*) words=$flags ;; esac
  COMPREPLY=( $(compgen -W "$words" -- "$cur") )
}
complete -o default -F _sandlot sandlot
`)
}

// fishCompletion writes one line per word. A subcommand is offered right behind its command, a flag anywhere
// behind it.
func fishCompletion(b *bytes.Buffer, all []place) {
	b.WriteString(`function __sandlot_words
    for word in (commandline -opc)[2..-1]
        string match -q -- '-*' $word; or echo $word
    end
end
function __sandlot_at
    set -l have (string join ' ' -- (__sandlot_words))
    test "$have" = "$argv"
end
function __sandlot_below
    set -l have (string join ' ' -- (__sandlot_words))
    string match -q -- "$argv*" "$have"
end
`)
	for _, p := range all {
		at := quoteShell(strings.TrimSpace("__sandlot_at " + p.path))
		for _, w := range slices.Concat(p.subs, p.values) {
			fmt.Fprintf(b, "complete -c sandlot -f -n %s -a %s -d %s\n", at, quoteShell(w.text), quoteShell(w.help))
		}
		below := quoteShell(strings.TrimSpace("__sandlot_below " + p.path))
		for _, w := range p.flags[len(p.flags)-p.own:] {
			dashes := "-l"
			if !strings.HasPrefix(w.text, "--") {
				dashes = "-s"
			}
			value := ""
			if slices.Contains(p.takes, w.text) {
				value = " -r"
			}
			fmt.Fprintf(b, "complete -c sandlot -n %s %s %s%s -d %s\n", below, dashes, quoteShell(strings.TrimLeft(w.text, "-")), value, quoteShell(w.help))
		}
	}
}

// quoteShell quotes a word for bash, zsh and fish alike: what it holds has no backslash.
func quoteShell(s string) string {
	return "'" + strings.ReplaceAll(s, "'", "'\"'\"'") + "'"
}
