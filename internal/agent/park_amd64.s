#include "textflag.h"

// func clonePark(script, fail *call) int64
//
// The child shares this process's memory and never returns: it makes one system call after the other from the
// table at script, each an entry of eight words {number, six arguments, result}. Where bit 32 of the number is set
// and the result is an error, it goes on at fail. It uses no stack and no Go.
TEXT ·clonePark(SB), NOSPLIT, $0-24
	MOVQ script+0(FP), R12
	MOVQ fail+8(FP), R13
	MOVQ $56, AX    // SYS_CLONE
	MOVQ $0x111, DI // CLONE_VM | SIGCHLD
	XORQ SI, SI     // the caller's stack, which the child does not touch
	XORQ DX, DX
	XORQ R10, R10
	XORQ R8, R8
	SYSCALL
	TESTQ AX, AX
	JZ next
	MOVQ AX, ret+16(FP)
	RET

next:
	MOVQ 0(R12), R15
	MOVL R15, AX
	MOVQ 8(R12), DI
	MOVQ 16(R12), SI
	MOVQ 24(R12), DX
	MOVQ 32(R12), R10
	MOVQ 40(R12), R8
	MOVQ 48(R12), R9
	SYSCALL
	MOVQ AX, 56(R12)
	ADDQ $64, R12
	TESTQ AX, AX
	JGE next
	BTQ $32, R15
	JCC next
	MOVQ R13, R12
	JMP next
