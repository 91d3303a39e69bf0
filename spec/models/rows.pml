/* SPDX-License-Identifier: Apache-2.0
 *
 * The core of the lifecycle (rows, refcounts, promotions) for Spin: a second notation, written
 * from spec/lifecycle.md and sharing nothing with kvsafe/lifecycle. Evictions choose any idle row,
 * so that what holds here holds for every replacement policy.
 *
 * ref[k]: ABSENT, -1 not ready, 0 evictable, above 0 pinned. Ghosts, which no rule reads: readers[]
 * counts who really reads, bytes[] says whose bytes a row really has.
 *
 * A fault is seeded with -DFAULT_NAME; `run` builds and runs all of them.
 */
#define NK 3
#define NR 2
#define NQ 2
#define ABSENT (-2)
#define NO_ROW NR
#define NO_KEY NK
#define STORE 1
#define PROMOTION 2

short ref[NK];
byte row[NK];
byte job[NK];
bool tier[NK];
byte owner[NR];

byte readers[NK];
byte bytes[NR];

bool awaits[NQ * NK];
bool spent[NQ * NK];
bool waiting[NQ];
bool loading[NQ];

/* Scratch inside atomic steps; no part of a state. */
hidden byte i, got, gone;

#define MINE (me * NK + k)

/* Every law that is about one moment. */
inline check() {
	d_step {
		i = 0;
		do
		:: i < NK ->
			if
			:: ref[i] == ABSENT -> assert(readers[i] == 0)
			:: ref[i] == -1 -> assert(readers[i] == 0 && owner[row[i]] == i)
			:: else ->
				assert(ref[i] >= 0);
				assert(ref[i] == readers[i]);
				assert(owner[row[i]] == i);
				assert(bytes[row[i]] == i)
			fi;
			i++
		:: else -> break
		od;
		i = 0;
		do
		:: i < NR ->
			assert(owner[i] == NO_KEY || (ref[owner[i]] != ABSENT && row[owner[i]] == i));
			i++
		:: else -> break
		od;
		i = 0
	}
}

/* The chunk of key x is gone: whoever waited for it has waited. */
inline over(x) {
	i = 0;
	do
	:: i < NQ ->
		if
		:: awaits[i * NK + x] ->
			awaits[i * NK + x] = false;
#ifndef RETRY_FOREVER
			spent[i * NK + x] = true
#endif
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0
}

inline drop(x) {
#ifndef LOSE_ROW
	owner[row[x]] = NO_KEY;
	bytes[row[x]] = NO_KEY;
#endif
	ref[x] = ABSENT;
	over(x)
}

#ifdef EVICT_PINNED
#define IDLE(x) (ref[x] >= 0)
#else
#ifdef EVICT_PENDING
#define IDLE(x) (ref[x] <= 0)
#else
#define IDLE(x) (ref[x] == 0)
#endif
#endif

#ifdef EVICT_UNREAD
#define UNREAD(x) false
#else
#define UNREAD(x) (awaits[x] || awaits[NK + x])
#endif

#define MAY_GO(r, promo) (owner[r] != NO_KEY && IDLE(owner[r]) && !(promo && UNREAD(owner[r])))

/* A row: a free one, else an idle one whose chunk goes; NO_ROW if there is neither. */
inline room(promo) {
	got = NO_ROW;
	if
	:: owner[0] == NO_KEY -> got = 0
	:: owner[1] == NO_KEY -> got = 1
	:: owner[0] != NO_KEY && owner[1] != NO_KEY && MAY_GO(0, promo) -> got = 0
	:: owner[0] != NO_KEY && owner[1] != NO_KEY && MAY_GO(1, promo) -> got = 1
	:: else
	fi;
	if
	:: got != NO_ROW && owner[got] != NO_KEY ->
		gone = owner[got];
		/* Law: a promotion evicts nothing that somebody was told to wait for. */
		assert(!(promo && (awaits[gone] || awaits[NK + gone])));
		assert(readers[gone] == 0);
		drop(gone)
	:: else
	fi
}

inline give(what) {
	owner[got] = k;
	bytes[got] = NO_KEY;
	row[k] = got;
	ref[k] = -1;
#ifdef READY_AT_ONCE
	ref[k] = 0;
#endif
	job[k] = what
}

proctype Request(byte me) {
	byte k;
again:
	atomic {
		/* Small worlds by symmetry: any key. */
		if :: k = 0 :: k = 1 :: k = 2 fi;
		awaits[me * NK] = false; awaits[me * NK + 1] = false; awaits[me * NK + 2] = false;
		spent[me * NK] = false; spent[me * NK + 1] = false; spent[me * NK + 2] = false;
		waiting[me] = true
	};
look:
	atomic {
		if
		:: ref[k] >= 0 ->
			awaits[MINE] = false;
#ifndef NO_PIN
			ref[k]++;
#endif
			readers[k]++;
			loading[me] = true;
			waiting[me] = false;
			check();
			goto load
#ifdef READ_PENDING
		:: ref[k] == -1 ->
			readers[k]++;
			loading[me] = true;
			waiting[me] = false;
			check();
			goto load
#else
		:: ref[k] == -1 && !spent[MINE] -> awaits[MINE] = true
#endif
#ifdef TWO_PROMOTIONS
		:: (ref[k] == ABSENT || ref[k] == -1) && tier[k] && !spent[MINE] ->
#else
		:: ref[k] == ABSENT && tier[k] && !spent[MINE] ->
#endif
			room(true);
			if
			:: got != NO_ROW -> give(PROMOTION); awaits[MINE] = true; check()
			:: else -> goto compute
			fi
		:: else -> goto compute
		fi
	};
	/* Comes back when the write is over, or when its wait for this key is spent. */
	atomic { (ref[k] != -1 || spent[MINE]) -> goto look };
load:
	atomic {
#ifdef UNPIN_TWICE
		ref[k] = ref[k] - 1;
#endif
#ifndef NO_UNPIN
		ref[k] = ref[k] - 1;
#endif
		readers[k]--;
		loading[me] = false;
		check()
	};
	goto again;
compute:
	waiting[me] = false;
	atomic {
		if
		:: ref[k] == ABSENT ->
			room(false);
			if :: got != NO_ROW -> give(STORE); check() :: else fi
		:: else
		fi
	};
	goto again
}

/* One per key, so that weak fairness means: every transfer reports. */
proctype Transfer(byte k) {
	do
	:: atomic {
#ifdef NEVER_REPORT
		(job[k] == STORE) ->
#else
		(job[k] != 0) ->
#endif
		if
		:: bytes[row[k]] = k;
			tier[k] = true;
			job[k] = 0;
			ref[k] = 0;
			check()
		:: true ->
#ifdef FAILED_IS_VISIBLE
			job[k] = 0;
			ref[k] = 0;
#else
#ifdef FREE_TWICE
			owner[row[k]] = NO_KEY;
			owner[(row[k] + 1) % NR] = NO_KEY;
#endif
			drop(k);
			job[k] = 0;
#endif
			check()
		fi
	}
	od
}

/* Another process removes an object, now and then. */
active proctype Vandal() {
	do
	:: atomic { tier[0] -> tier[0] = false }
	:: atomic { tier[1] -> tier[1] = false }
	od
}

init {
	byte n;
	atomic {
		n = 0;
		do :: n < NK -> ref[n] = ABSENT; tier[n] = true; n++ :: else -> break od;
		n = 0;
		do :: n < NR -> owner[n] = NO_KEY; bytes[n] = NO_KEY; n++ :: else -> break od;
		run Request(0); run Request(1);
		run Transfer(0); run Transfer(1); run Transfer(2)
	}
}

ltl resolves { [] (waiting[0] -> <> !waiting[0]) }
ltl ends { [] (loading[0] -> <> !loading[0]) }
ltl reports { [] (job[0] != 0 -> <> (job[0] == 0)) }
