//! The agreement where the frames are not ours: the word rides on collectives of a library that only sums or
//! gathers (torch.distributed). Pure.
//!
//! One tick is one synchronised backward pass; its buckets are exchanged one after the other in the same order on
//! every rank. Two forms of the word exist:
//!
//! - **gathered**: every rank's block begins with [`HEAD_BYTES`] bytes: a check and a [`Status`];
//! - **summed**: [`WORD_BITS`] more elements at the end of what is summed, each 0 or 1. The sum of a bit over N ranks
//!   is 0 or N exactly when all ranks agree on it, in any element type that counts to N (fp16: 2048, bf16: 256).
//!
//! The check is 32 bits of a hash over step, iteration, version, digest, bucket and length: ranks that ran apart
//! see it, all of them alike, in the very exchange in which it happens.
//!
//! The plan itself is long and rare, so it has room only when rank 0 has asked for it: a status bit in tick t opens
//! [`ROOM_BYTES`] on the first bucket of tick t + 1, which carries rank 0's whole [`ControlWord`]; its plan takes
//! force at tick t + 2. Where that bucket is summed, tick t + 1 has one more small allreduce for the room: behind the
//! gradient it would change how a ring rounds that. In steady state the word is 8 bytes, or 36 elements, of a payload
//! that travels anyway.

use crate::agreement::{Agreement, Change, Disagreement, Tick};
use crate::word::{ControlWord, WORD_MAX, WordError};
use flexcomm_domain::Rank;

/// Bytes of the word in front of every gathered block: check, status, zeros.
pub const HEAD_BYTES: usize = 8;

/// Where in these bytes the status is, and which of its bits says that a gradient was not finite: for those who learn that
/// after the word was written.
pub const STATUS_AT: usize = 4;
/// See [`STATUS_AT`].
pub const NOT_FINITE: u8 = 2;

/// Elements of the word behind every summed payload.
pub const WORD_BITS: usize = CHECK_BITS + STATUS_BITS;

/// Bytes of the room for a plan: a length and the longest control word.
pub const ROOM_BYTES: usize = 2 + WORD_MAX;

const CHECK_BITS: usize = 32;
const STATUS_BITS: usize = 4;

/// What a rank says about itself besides the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Status {
    /// It could not do its part; its payload means nothing.
    pub failed: bool,
    /// Its gradient has values that are not finite; its payload means nothing.
    pub not_finite: bool,
    /// Rank 0 wants room for a plan in the next tick.
    pub room: bool,
    /// It can run live trials.
    pub live: bool,
}

impl Status {
    fn to_byte(self) -> u8 {
        u8::from(self.failed)
            | if self.not_finite { NOT_FINITE } else { 0 }
            | u8::from(self.room) << 2
            | u8::from(self.live) << 3
    }

    fn from_byte(byte: u8) -> Self {
        Self { failed: byte & 1 != 0, not_finite: byte & NOT_FINITE != 0, room: byte & 4 != 0, live: byte & 8 != 0 }
    }
}

/// What all ranks said together: the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Heard {
    /// How many ranks failed.
    pub failed: u32,
    /// The lowest rank that failed, where the transport tells.
    pub first_failed: Option<u32>,
    /// How many ranks' gradients have values that are not finite.
    pub not_finite: u32,
    /// The lowest such rank, where the transport tells.
    pub first_not_finite: Option<u32>,
}

impl Heard {
    /// Whether the exchange may be used.
    pub fn good(&self) -> bool {
        self.failed == 0 && self.not_finite == 0
    }
}

/// An exchange that must not be used. Every rank finds it in the same exchange.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RidingError {
    /// A rank is elsewhere.
    #[error("agree with {who} in step {step}, bucket {bucket}: it runs another step, strategy or bucket than {ours}")]
    Apart {
        /// Which rank, or "all ranks".
        who: String,
        /// This rank's.
        step: u64,
        /// This rank's.
        bucket: u32,
        /// What this rank runs.
        ours: String,
    },
    /// A payload of another size than the word needs.
    #[error("read the word of bucket {bucket}: {got} elements where {need} are needed")]
    Size {
        /// Which.
        bucket: u32,
        /// As given.
        got: usize,
        /// As needed.
        need: usize,
    },
    /// Rank 0's plan cannot be read.
    #[error(transparent)]
    Word(#[from] WordError),
    /// Rank 0's plan contradicts what this rank knows.
    #[error(transparent)]
    Plan(#[from] Disagreement),
}

/// One rank's part in the agreement over a library's collectives.
#[derive(Debug, Clone)]
pub struct Riding {
    agreement: Agreement,
    rank: Rank,
    world: u32,
    /// Whether this tick's first bucket has room for a plan.
    room: bool,
    room_next: bool,
    live: bool,
    live_ranks: u32,
    strategy: String,
}

impl Riding {
    /// Around an agreement that no other frames feed.
    pub fn new(agreement: Agreement, rank: Rank, world: u32) -> Self {
        let strategy = agreement.in_force().strategy.to_string();
        Self { agreement, rank, world, room: false, room_next: false, live: false, live_ranks: 0, strategy }
    }

    /// The agreement, to offer things to.
    pub fn agreement(&mut self) -> &mut Agreement {
        &mut self.agreement
    }

    /// The agreement, to look at.
    pub fn look(&self) -> &Agreement {
        &self.agreement
    }

    /// Says from the next word on whether this rank can run live trials.
    pub fn set_live(&mut self, live: bool) {
        self.live = live;
    }

    /// Whether all ranks said so in the last tick.
    pub fn live_everywhere(&self) -> bool {
        self.live_ranks == self.world
    }

    /// How many ranks said so. Every rank heard the same number.
    pub fn live_ranks(&self) -> u32 {
        self.live_ranks
    }

    /// Whether the next tick has room for a plan: all ranks have heard so in this one. Who needs something for a trial gets
    /// it ready between the two, and says in the next tick's words whether it can.
    pub fn plan_follows(&self) -> bool {
        self.room_next
    }

    /// Starts a tick, before its first bucket.
    pub fn begin(&mut self) -> Tick {
        self.room = std::mem::take(&mut self.room_next);
        let tick = self.agreement.begin_with(self.room);
        self.strategy = tick.strategy.to_string();
        tick
    }

    /// Ends a tick, after its last bucket.
    pub fn finish(&mut self) -> Change {
        self.agreement.finish()
    }

    fn has_room(&self, bucket: u32) -> bool {
        self.room && bucket == 0
    }

    /// Elements that the summed word of a bucket takes in this tick.
    pub fn bits(&self, bucket: u32) -> usize {
        WORD_BITS + if self.has_room(bucket) { ROOM_BYTES * 8 } else { 0 }
    }

    /// Bytes that the gathered word of a bucket takes in this tick.
    pub fn bytes(&self, bucket: u32) -> usize {
        HEAD_BYTES + if self.has_room(bucket) { ROOM_BYTES } else { 0 }
    }

    /// 32 bits over everything that must be alike on all ranks. splitmix64's finaliser over the parts.
    fn check(&self, bucket: u32, length: usize) -> u32 {
        let word = self.agreement.word();
        let iteration = word.iteration.map_or(0, |i| u64::from(i) + 1);
        let parts = [word.step, word.version.0, word.digest.0, iteration, u64::from(bucket), length as u64];
        let mut hash = 0x9e37_79b9_7f4a_7c15u64;
        for part in parts {
            hash = (hash ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
            hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            hash ^= hash >> 31;
        }
        (hash >> 32) as u32
    }

    fn status(&self, bucket: u32, own: Status) -> Status {
        let first = bucket == 0;
        Status { room: first && !self.room && self.agreement.wants(), live: self.live, ..own }
    }

    /// Rank 0's control word, with its length in front, padded to [`ROOM_BYTES`]; zeros on other ranks.
    fn plan_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0, 0];
        let word = self.agreement.word();
        if self.rank == Rank(0) && word.plan.is_some() {
            word.encode(&mut bytes);
            // At most WORD_MAX, far below 2^16.
            let length = (bytes.len() - 2) as u16;
            bytes[..2].copy_from_slice(&length.to_le_bytes());
        }
        bytes.resize(ROOM_BYTES, 0);
        bytes
    }

    /// Writes the word of a summed payload: [`Self::bits`] zeros and ones. `length` is the bucket's.
    pub fn write_bits(&self, bucket: u32, length: usize, own: Status, out: &mut [f32]) -> Result<(), RidingError> {
        self.expect(bucket, out.len(), self.bits(bucket))?;
        let bit = |byte: u8, i: usize| f32::from(byte >> i & 1);
        let check = self.check(bucket, length);
        out[..CHECK_BITS].iter_mut().enumerate().for_each(|(i, o)| *o = (check >> i & 1) as f32);
        let status = self.status(bucket, own).to_byte();
        out[CHECK_BITS..WORD_BITS].iter_mut().enumerate().for_each(|(i, o)| *o = bit(status, i));
        if self.has_room(bucket) {
            for (byte, out) in self.plan_bytes().iter().zip(out[WORD_BITS..].chunks_exact_mut(8)) {
                out.iter_mut().enumerate().for_each(|(i, o)| *o = bit(*byte, i));
            }
        }
        Ok(())
    }

    /// Takes in the sums of a summed word.
    pub fn hear_bits(&mut self, bucket: u32, length: usize, sums: &[f32]) -> Result<Heard, RidingError> {
        self.expect(bucket, sums.len(), self.bits(bucket))?;
        let (check, world) = (self.check(bucket, length), self.world as f32);
        let agreed = |(i, sum): (usize, &f32)| *sum == if check >> i & 1 == 1 { world } else { 0.0 };
        if !sums[..CHECK_BITS].iter().enumerate().all(agreed) {
            return Err(self.apart("all ranks".into(), bucket));
        }
        let count = |i: usize| sums[CHECK_BITS + i] as u32;
        if bucket == 0 {
            self.hear_status(count(2) > 0, count(3));
        }
        if self.has_room(bucket) {
            // Only rank 0's bits are not zero, so the sum is its bytes.
            let byte = |bits: &[f32]| bits.iter().enumerate().fold(0, |b, (i, v)| b | u8::from(*v > 0.5) << i);
            let bytes: Vec<u8> = sums[WORD_BITS..].chunks_exact(8).map(byte).collect();
            self.hear_plan(&bytes)?;
        }
        Ok(Heard { failed: count(0), not_finite: count(1), first_failed: None, first_not_finite: None })
    }

    /// Writes the word of a gathered block: [`Self::bytes`] bytes.
    pub fn write_bytes(&self, bucket: u32, length: usize, own: Status, out: &mut [u8]) -> Result<(), RidingError> {
        self.expect(bucket, out.len(), self.bytes(bucket))?;
        out[..HEAD_BYTES].fill(0);
        out[..4].copy_from_slice(&self.check(bucket, length).to_le_bytes());
        out[STATUS_AT] = self.status(bucket, own).to_byte();
        if self.has_room(bucket) {
            out[HEAD_BYTES..].copy_from_slice(&self.plan_bytes());
        }
        Ok(())
    }

    /// Takes in the words of all ranks' blocks, in rank order.
    pub fn hear_bytes<'a>(
        &mut self,
        bucket: u32,
        length: usize,
        words: impl Iterator<Item = &'a [u8]>,
    ) -> Result<Heard, RidingError> {
        let (check, mut heard) = (self.check(bucket, length).to_le_bytes(), Heard::default());
        let (mut room, mut live, mut plan) = (false, 0, None);
        for (rank, word) in words.enumerate() {
            self.expect(bucket, word.len(), self.bytes(bucket))?;
            if word[..4] != check {
                return Err(self.apart(format!("rank {rank}"), bucket));
            }
            let (status, rank) = (Status::from_byte(word[STATUS_AT]), rank as u32);
            heard.failed += u32::from(status.failed);
            heard.not_finite += u32::from(status.not_finite);
            heard.first_failed = heard.first_failed.or(status.failed.then_some(rank));
            heard.first_not_finite = heard.first_not_finite.or(status.not_finite.then_some(rank));
            room |= status.room;
            live += u32::from(status.live);
            if rank == 0 && self.has_room(bucket) {
                plan = Some(word[HEAD_BYTES..].to_vec());
            }
        }
        if bucket == 0 {
            self.hear_status(room, live);
        }
        plan.map_or(Ok(()), |bytes| self.hear_plan(&bytes))?;
        Ok(heard)
    }

    /// Only the checks and statuses of words without room: side messages of a bucket.
    pub fn compare_heads<'a>(
        &self,
        bucket: u32,
        length: usize,
        heads: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), RidingError> {
        let check = self.check(bucket, length).to_le_bytes();
        for (rank, head) in heads.enumerate() {
            if head.get(..4) != Some(&check[..]) {
                return Err(self.apart(format!("rank {rank}"), bucket));
            }
        }
        Ok(())
    }

    /// A head for a side message, see [`Self::compare_heads`].
    pub fn head(&self, bucket: u32, length: usize, own: Status) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&self.check(bucket, length).to_le_bytes());
        head[STATUS_AT] = own.to_byte();
        head
    }

    fn hear_status(&mut self, room: bool, live: u32) {
        self.room_next = room;
        self.live_ranks = live;
    }

    fn hear_plan(&mut self, bytes: &[u8]) -> Result<(), RidingError> {
        let length = usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
        if length == 0 {
            return Ok(());
        }
        let short = WordError::Short { got: bytes.len() - 2, need: length };
        let word = ControlWord::decode(bytes.get(2..2 + length).ok_or(short)?)?;
        Ok(self.agreement.accept(Rank(0), &word)?)
    }

    fn expect(&self, bucket: u32, got: usize, need: usize) -> Result<(), RidingError> {
        if got == need { Ok(()) } else { Err(RidingError::Size { bucket, got, need }) }
    }

    fn apart(&self, who: String, bucket: u32) -> RidingError {
        let word = self.agreement.word();
        let trial = word.iteration.map_or(String::new(), |i| format!(", iteration {i} of a trial"));
        let ours = format!("rank {}: version {}, {}{trial}", self.rank, word.version, self.strategy);
        RidingError::Apart { who, step: word.step, bucket, ours }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::Offer;
    use crate::word::TrialPlan;
    use flexcomm_domain::{Strategy, Version};
    use proptest::prelude::*;

    fn job(n: u32) -> Vec<Riding> {
        let rank = |r| Riding::new(Agreement::new(Rank(r), Strategy::DENSE_RING, 0), Rank(r), n);
        (0..n).map(rank).collect()
    }

    /// One tick of two buckets; `summed` says how the word travels.
    fn tick(job: &mut [Riding], summed: bool) -> Result<Vec<(Tick, Change)>, RidingError> {
        let ticks: Vec<_> = job.iter_mut().map(Riding::begin).collect();
        for bucket in 0..2 {
            if summed {
                let mut sums = vec![0.0f32; job[0].bits(bucket)];
                for rank in job.iter() {
                    let mut word = vec![9.0; sums.len()];
                    rank.write_bits(bucket, 10, Status::default(), &mut word)?;
                    sums.iter_mut().zip(word).for_each(|(s, w)| *s += w);
                }
                for rank in job.iter_mut() {
                    assert!(rank.hear_bits(bucket, 10, &sums)?.good());
                }
            } else {
                let mut words = vec![vec![9; job[0].bytes(bucket)]; job.len()];
                for (rank, word) in job.iter().zip(&mut words) {
                    rank.write_bytes(bucket, 10, Status::default(), word)?;
                }
                for rank in job.iter_mut() {
                    assert!(rank.hear_bytes(bucket, 10, words.iter().map(Vec::as_slice))?.good());
                }
            }
        }
        Ok(ticks.into_iter().zip(job.iter_mut().map(Riding::finish)).collect())
    }

    proptest! {
        #[test]
        fn everything_offered_takes_force_everywhere_at_the_same_tick(
            n in 1u32..6,
            offers in prop::collection::vec((0usize..30, 0usize..6, 0u64..6, 0usize..3), 0..20),
            summed in prop::collection::vec(any::<bool>(), 40),
        ) {
            let mut job = job(n);
            let strategies = ["topk@0.1/allgather", "topk@0.01/art-ring:star", "lwtopk@0.1/allgather"];
            let mut newest = 0;
            for (t, summed) in summed.iter().enumerate() {
                for (at, kind, number, which) in &offers {
                    if *at != t { continue; }
                    let strategy: Strategy = strategies[*which].parse().unwrap();
                    let agreement = job[0].agreement();
                    match kind {
                        0 => { agreement.offer_trial(TrialPlan::new(*number, vec![strategy], 2, 0).unwrap()); }
                        _ => if agreement.offer_decision(Version(*number), strategy) == Offer::Taken { newest = *number; }
                    }
                    // Other ranks' orders never count.
                    if let Some(other) = job.get_mut(1) {
                        prop_assert_eq!(other.agreement().offer_decision(Version(99), strategy), Offer::NotLeader);
                    }
                }
                let done = tick(&mut job, *summed).unwrap();
                for (tick, change) in &done[1..] {
                    prop_assert_eq!((tick, change), (&done[0].0, &done[0].1));
                }
            }
            // The last offer came at tick 29 at the latest; two ticks announce it, a trial before it takes a few.
            for rank in &job {
                prop_assert_eq!(rank.look().in_force().version, Version(newest));
            }
        }
    }

    #[test]
    fn a_rank_that_ran_apart_is_seen_by_all_at_once() {
        for summed in [false, true] {
            let mut job = job(3);
            tick(&mut job, summed).unwrap();
            job[2].begin();
            job[2].finish();
            let error = tick(&mut job, summed).unwrap_err().to_string();
            assert!(error.contains("another step, strategy or bucket"), "{error}");
        }
    }

    #[test]
    fn statuses_are_counted_and_ranks_named_where_known() {
        let mut job = job(3);
        job.iter_mut().for_each(|r| {
            r.begin();
        });
        let statuses = [
            Status::default(),
            Status { not_finite: true, ..Status::default() },
            Status { failed: true, ..Status::default() },
        ];
        let mut words = vec![vec![0; HEAD_BYTES]; 3];
        let mut sums = vec![0.0; WORD_BITS];
        for ((rank, word), own) in job.iter().zip(&mut words).zip(statuses) {
            rank.write_bytes(1, 5, own, word).unwrap();
            let mut bits = vec![0.0; WORD_BITS];
            rank.write_bits(1, 5, own, &mut bits).unwrap();
            sums.iter_mut().zip(bits).for_each(|(s, b)| *s += b);
        }
        let heard = job[0].hear_bytes(1, 5, words.iter().map(Vec::as_slice)).unwrap();
        assert_eq!(
            (heard.failed, heard.first_failed, heard.not_finite, heard.first_not_finite),
            (1, Some(2), 1, Some(1))
        );
        let heard = job[0].hear_bits(1, 5, &sums).unwrap();
        assert_eq!((heard.failed, heard.not_finite, heard.good()), (1, 1, false));
        assert!(job[0].hear_bits(1, 6, &sums).is_err(), "another length is another bucket");
    }

    #[test]
    fn live_needs_everybody() {
        let mut job = job(2);
        job[0].set_live(true);
        tick(&mut job, true).unwrap();
        assert!(!job[0].live_everywhere());
        job[1].set_live(true);
        tick(&mut job, false).unwrap();
        assert!(job.iter().all(Riding::live_everywhere));
    }
}
