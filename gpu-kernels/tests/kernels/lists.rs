//! Gathered payloads of values at indices, added up where they lie, against the CPU side's pipeline: all codings, any place in
//! memory, and bytes that are not what they had to be.

use crate::data::heavy_tails;
use crate::emulated::{Emulated, Memory};
use crate::layers::step_to;
use crate::topk::bits;
use flexcomm_compression::codec::ReadError;
use flexcomm_compression::pipeline::{Gradient as CpuGradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::{IndexCoding, Writer};
use flexcomm_compression::{Energy, Layers as CpuLayers};
use flexcomm_gpu_kernels::bucket::{Gradient, Layers, Method};
use flexcomm_gpu_kernels::{
    Copies, DType, Device, LaunchError, ListRoom, Lists, OUTCOME_BYTES, Outcome, Random, RandomK, Span, Target,
    Threshold, add_lists, list_bytes, lists_room,
};

const SEED: u64 = 12;

/// Bytes of the word in front of a message.
const WORD: usize = 8;

fn step(index: u64) -> Step {
    Step { index, learning_rate: 0.1 }
}

fn header_bytes(message: &[u8]) -> usize {
    32 + 8 * usize::from(message[7])
}

/// One process of several on the CPU side.
fn process(text: &str, n: usize, (rank, world): (u32, u32)) -> Pipeline {
    let member = Member { rank, world, ..Member::alone(SEED) };
    Pipeline::new(&text.parse().unwrap(), CpuLayers::fused(n).unwrap(), member)
}

/// This rank's gradient in this step: of any magnitude, with zeros of both signs.
fn gradient(n: usize, (rank, index): (u32, u64)) -> Vec<f32> {
    let mut values = heavy_tails(n);
    values.rotate_left((7 * rank as usize + 3 * index as usize) % n.max(1));
    values.iter_mut().enumerate().for_each(|(i, value)| match i % 5 {
        0 => *value = -0.0,
        1 => *value *= 1e-42,
        _ => {}
    });
    values
}

/// Messages of one step of all ranks, and their mean.
fn gathered(text: &str, n: usize, world: u32) -> (Vec<Vec<u8>>, Vec<f32>) {
    let messages: Vec<Vec<u8>> = (0..world)
        .map(|rank| {
            let mut message = Writer::new();
            let own = gradient(n, (rank, 0));
            process(text, n, (rank, world)).compress(CpuGradient::F32(&own), step(0), &mut message).unwrap();
            message.into_vec()
        })
        .collect();
    let mut mean = vec![0.0; n];
    let all: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    process(text, n, (0, world)).aggregate(&all, 0, &mut mean).unwrap();
    (messages, mean)
}

/// Blocks as they are gathered, `offset` bytes into the memory: a word, a message, and `gap` bytes up to the next one. What is
/// no payload is `filler`.
struct Blocks {
    memory: Memory,
    first: u64,
    stride: u64,
}

impl Blocks {
    fn new(messages: &[Vec<u8>], (offset, gap): (usize, usize), filler: u8) -> Self {
        let header = header_bytes(&messages[0]);
        let mut all = vec![filler; offset];
        for message in messages {
            all.extend_from_slice(&[filler; WORD]);
            all.extend(message[..header].iter().map(|_| filler));
            all.extend_from_slice(&message[header..]);
            all.extend(std::iter::repeat_n(filler, gap));
        }
        let stride = WORD + messages[0].len() + gap;
        Self { memory: Memory::of(&all), first: (offset + WORD + header) as u64, stride: stride as u64 }
    }

    fn lists(&self, (n, k): (u64, u64), ranks: u32) -> Lists {
        let all = self.memory.span();
        Lists { n, k, payloads: all.part(self.first, all.bytes() - self.first), stride: self.stride, ranks }
    }
}

/// The sum, and what is said of the payloads.
fn sum(device: &Emulated, lists: &Lists, scale: f32) -> (Vec<f32>, u32) {
    let out = Memory::of(&vec![0.0f32; lists.n as usize]);
    let counts = Memory::new(lists_room(lists.n, lists.k, lists.ranks));
    // Garbage of a call before.
    let refused = Memory::of(&[77u32]);
    let room = ListRoom { counts: counts.span(), refused: refused.span() };
    add_lists(device, lists, Target { scale, out: out.span() }, &room).unwrap();
    drop(counts.bytes());
    (out.f32s(), refused.u32s()[0])
}

/// Of every coding, with no, few and many lower bits, and more than a tile of bits.
const SIZES: [(usize, usize); 14] = [
    (1, 1),
    (3, 2),
    (33, 8),
    (256, 64),
    (1000, 10),
    (1000, 1000),
    (5000, 1249),
    (4097, 8),
    (20_011, 2001),
    (20_011, 7000),
    (20_011, 20_011),
    (70_001, 100),
    (70_001, 17_000),
    (200_000, 1),
];

#[test]
fn sums_of_gathered_payloads_are_the_cpus_at_any_byte() {
    let mut codings = Vec::new();
    for (at, (n, k)) in SIZES.into_iter().enumerate() {
        let Some(device) = Emulated::new(at as u64) else { return };
        codings.push(IndexCoding::least(n as u64, k as u64));
        for (text, world) in [(format!("topk(k={k})"), 3), (format!("mstopk(k={k})+ef(vanilla)"), 2)] {
            let (messages, mean) = gathered(&text, n, world);
            let payload = messages[0].len() - header_bytes(&messages[0]);
            assert_eq!(payload as u64, list_bytes(n as u64, k as u64), "{text} of {n}");
            // Offsets of both: the beginning of memory, and from one block to the next.
            for offset in if n < 5000 { 0..8 } else { at..at + 2 } {
                let blocks = Blocks::new(&messages, (offset, 5 * offset % 8), 0xff);
                let lists = blocks.lists((n as u64, k as u64), world);
                let (got, refused) = sum(&device, &lists, 1.0 / world as f32);
                assert_eq!(refused, 0, "{text} of {n} at {offset}");
                assert!(bits(&got) == bits(&mean), "{text} of {n} at {offset}");
            }
        }
    }
    for coding in [IndexCoding::U32, IndexCoding::EliasFano, IndexCoding::Bitmap] {
        assert!(codings.contains(&coding), "{coding:?}");
    }
}

#[test]
fn every_k_of_short_tensors_is_read() {
    for n in 1..=20usize {
        let Some(device) = Emulated::new(n as u64) else { return };
        for k in 1..=n {
            let (messages, mean) = gathered(&format!("topk(k={k})"), n, 2);
            let blocks = Blocks::new(&messages, (k % 4, n % 3), 0);
            let (got, refused) = sum(&device, &blocks.lists((n as u64, k as u64), 2), 0.5);
            assert_eq!((bits(&got), refused), (bits(&mean), 0), "{k} of {n}");
        }
    }
}

/// No values at all, and of nothing.
#[test]
fn payloads_without_values_add_nothing() {
    let Some(device) = Emulated::new(1) else { return };
    let empty = Memory::of(&[0u8, 0, 0, 0, 1]);
    for n in [0, 9] {
        let lists = Lists { n, k: 0, payloads: empty.span(), stride: 5, ranks: 1 };
        assert_eq!(sum(&device, &lists, 1.0), (vec![0.0; n as usize], 0));
    }
    let other = Memory::of(&[1u8, 0, 0, 0, 1]);
    let lists = Lists { n: 9, k: 0, payloads: other.span(), stride: 5, ranks: 1 };
    assert_eq!(sum(&device, &lists, 1.0), (vec![0.0; 9], 1));
}

/// What the CPU side makes of a payload behind this header.
fn on_the_cpu(rank: &mut Pipeline, header: &[u8], payload: &[u8]) -> Result<Vec<f32>, ReadError> {
    let mut mean = vec![0.0; rank.layers().values()];
    rank.aggregate(&[&[header, payload].concat()], 0, &mut mean).map(|()| mean)
}

/// A payload that the CPU side's reader takes is added as there, and one that it refuses is reported; whatever it is, nothing
/// depends on bytes around it, and nothing around `out` is written ([`Memory`] looks).
fn check_payload(device: &Emulated, cpu: &mut Pipeline, (header, payload): (&[u8], &[u8]), k: usize) {
    let n = cpu.layers().values();
    let run = |filler: u8, offset: usize| {
        let all = [&vec![filler; offset][..], payload, &[filler; 9]].concat();
        let memory = Memory::of(&all);
        let payloads = memory.span().part(offset as u64, payload.len() as u64);
        let lists = Lists { n: n as u64, k: k as u64, payloads, stride: payload.len() as u64, ranks: 1 };
        sum(device, &lists, 1.0)
    };
    let offset = payload.len() % 8;
    let ((got, refused), other) = (run(0, offset), run(0xff, offset + 4));
    let expected = k as u32 == u32::from_le_bytes(payload[..4].try_into().unwrap())
        && payload[4] == IndexCoding::least(n as u64, k as u64) as u8;
    match on_the_cpu(cpu, header, payload).ok().filter(|_| expected) {
        Some(want) => {
            assert_eq!((refused, other.1), (0, 0), "{k} of {n}: it is a payload");
            assert!(bits(&got) == bits(&want) && bits(&other.0) == bits(&want), "{k} of {n}");
        }
        None => assert_eq!((refused, other.1), (1, 1), "{k} of {n}: it is none"),
    }
    assert!(got.iter().chain(&other.0).all(|value| value.is_finite()));
}

/// Of every coding.
const DAMAGED: [(usize, usize); 8] =
    [(1, 1), (3, 2), (33, 8), (60, 40), (1000, 10), (4097, 8), (9000, 3001), (200_000, 1)];

#[test]
fn a_payload_with_any_bit_changed_is_reported_or_harmless() {
    for (seed, (n, k)) in DAMAGED.into_iter().enumerate() {
        let Some(device) = Emulated::new(seed as u64) else { return };
        let text = format!("topk(k={k})");
        let (messages, _) = gathered(&text, n, 1);
        let (header, payload) = messages[0].split_at(header_bytes(&messages[0]));
        let mut cpu = process(&text, n, (0, 1));
        check_payload(&device, &mut cpu, (header, payload), k);
        let count = 8 * payload.len();
        // All of short ones; of long ones the front, the last, and some between.
        let every = if n > 5000 { count / 40 + 1 } else { count / 400 + 1 };
        for bit in (0..count).filter(|bit| *bit < 48 || *bit + 8 >= count || bit % every == 0) {
            let mut changed = payload.to_vec();
            changed[bit / 8] ^= 1 << (bit % 8);
            check_payload(&device, &mut cpu, (header, &changed), k);
        }
    }
}

#[test]
fn any_bytes_are_reported_or_harmless() {
    let stream = Stream::new(5, [0; 4]);
    let cases = DAMAGED.into_iter().flat_map(|size| (0..24u32).map(move |case| (size, case)));
    for (seed, ((n, k), case)) in cases.filter(|((n, _), case)| *n < 100_000 || *case < 6).enumerate() {
        let Some(device) = Emulated::new(seed as u64) else { return };
        let text = format!("topk(k={k})");
        let (messages, _) = gathered(&text, n, 1);
        let (header, payload) = messages[0].split_at(header_bytes(&messages[0]));
        let mut bytes = payload.to_vec();
        // Whole payloads of noise, or of one byte again and again, behind a front that is right or is not; some only in part.
        let from = if case % 3 == 0 { 0 } else { 5 };
        let to = if case % 2 == 0 { bytes.len() } else { (bytes.len() + from) / 2 };
        for (i, byte) in (0u32..).zip(&mut bytes).skip(from).take(to - from) {
            *byte = match case % 4 {
                0 => 0,
                1 => 0xff,
                _ => (stream.word(i << 8 | case) >> 24) as u8,
            };
        }
        check_payload(&device, &mut process(&text, n, (0, 1)), (header, &bytes), k);
    }
}

/// Which rank's it was: the last one of several.
#[test]
fn the_rank_of_a_bad_payload_is_named() {
    let Some(device) = Emulated::new(2) else { return };
    for (n, k) in [(1000usize, 10usize), (1000, 500), (200_000, 1)] {
        let (mut messages, _) = gathered(&format!("topk(k={k})"), n, 5);
        for rank in [1usize, 3] {
            let (header, whole) = (header_bytes(&messages[rank]), messages[rank].clone());
            // The last value is infinite.
            let end = whole.len();
            messages[rank][end - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
            let blocks = Blocks::new(&messages, (3, 1), 0);
            assert_eq!(sum(&device, &blocks.lists((n as u64, k as u64), 5), 0.2).1, rank as u32 + 1);
            // Another coding than n and k say.
            messages[rank].clone_from(&whole);
            messages[rank][header + 4] = 3;
            let blocks = Blocks::new(&messages, (2, 7), 0);
            assert_eq!(sum(&device, &blocks.lists((n as u64, k as u64), 5), 0.2).1, rank as u32 + 1);
        }
    }
}

/// One process, its device and its CPU side.
struct Rank {
    number: u32,
    borrowed: Memory,
    layers: Layers,
    cpu: Pipeline,
}

const WORLD: u32 = 3;

/// Values of the tensor.
const N: usize = 3001;

type Make = fn(Random) -> Method;

impl Rank {
    fn new(device: &Emulated, number: u32, (text, make): (&str, Make)) -> Self {
        let methods = [make(Random { seed: SEED, step: 0, tensor: 0, rank: Some(number) })];
        let borrowed = Memory::new(Layers::bytes(&[N as u64], &methods).unwrap());
        let layers = Layers::new(device, &[N as u64], &methods, borrowed.span()).unwrap();
        Self { number, borrowed, layers, cpu: process(text, N, (number, WORLD)) }
    }

    /// On the CPU side: a step's message.
    fn message(&mut self, index: u64) -> (Vec<u8>, Energy) {
        let (mut message, own) = (Writer::new(), gradient(N, (self.number, index)));
        let outcome = self.cpu.compress(CpuGradient::F32(&own), step(index), &mut message).unwrap();
        (message.into_vec(), outcome.energy)
    }

    /// On the device: its payload into the block, and its word, whose last byte is in front of the payload here.
    fn send(&mut self, device: &Emulated, make: Make, index: u64, blocks: &Blocks) {
        let method = make(Random { seed: SEED, step: index, tensor: 0, rank: Some(self.number) });
        let source = Memory::of(&gradient(N, (self.number, index)));
        let given = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
        let (all, at) = (blocks.memory.span(), blocks.first + u64::from(self.number) * blocks.stride);
        let to = all.part(at, method.sent_bytes(N as u64).unwrap());
        step_to(device, &mut self.layers, given, (method, to));
        self.layers.mark(device, all.part(at - 1, 1), 2).unwrap();
    }

    /// The mean of what was gathered, as added up by this rank.
    fn mean(&self, device: &Emulated, lists: &Lists) -> Vec<f32> {
        let out = Memory::of(&vec![0.0f32; N]);
        let room = ListRoom { counts: self.layers.workspace(), refused: self.layers.refused() };
        add_lists(device, lists, Target { scale: 1.0 / lists.ranks as f32, out: out.span() }, &room).unwrap();
        out.f32s()
    }
}

/// A training step from kernels to the collective and back, of every method whose payload is such a list: what is gathered is
/// what hosts send, and the mean theirs, over steps with error feedback.
#[test]
fn messages_stay_on_the_device_from_step_to_mean() {
    let cases: [(&str, Make); 4] = [
        ("topk(k=70)+ef(vanilla)", |_| Method::TopK(70)),
        ("topk(k=2000)+ef(vanilla)", |_| Method::TopK(2000)),
        ("mstopk(k=40)+ef(vanilla)", |random| Method::Threshold(Threshold::MsTopK { k: 40, random })),
        ("randomk(k=33,shared=false)+ef(vanilla)", |random| Method::RandomK(RandomK { k: 33, scaled: false, random })),
    ];
    for (seed, case) in cases.into_iter().enumerate() {
        let Some(device) = Emulated::new(seed as u64) else { return };
        let mut ranks: Vec<Rank> = (0..WORLD).map(|number| Rank::new(&device, number, case)).collect();
        for index in 0..3u64 {
            check_step(&device, &mut ranks, (case.1, index));
        }
        ranks.iter().for_each(|rank| drop(rank.borrowed.bytes()));
    }
}

fn check_step(device: &Emulated, ranks: &mut [Rank], (make, index): (Make, u64)) {
    let (messages, energies): (Vec<_>, Vec<_>) = ranks.iter_mut().map(|rank| rank.message(index)).unzip();
    let places = (index as usize % 4, 1);
    let blocks = Blocks::new(&messages, places, 0);
    // Every rank writes its own payload, and nothing else.
    device.zero(blocks.memory.span()).unwrap();
    ranks.iter_mut().for_each(|rank| rank.send(device, make, index, &blocks));
    assert_eq!(blocks.memory.bytes(), Blocks::new(&messages, places, 0).memory.bytes());
    let mut mean = vec![0.0; N];
    let all: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    ranks[0].cpu.aggregate(&all, index, &mut mean).unwrap();
    let payload = &messages[0][header_bytes(&messages[0])..];
    let k = u32::from_le_bytes(*payload.first_chunk().unwrap());
    let got = ranks[0].mean(device, &blocks.lists((N as u64, k.into()), WORLD));
    assert!(bits(&got) == bits(&mean), "{k}, step {index}");
    // Everything that the host wants to know, in one copy.
    let mut said = vec![0; ranks[0].layers.outcomes().bytes() as usize];
    device.download(ranks[0].layers.outcomes(), &mut said).unwrap();
    let (outcome, sent) = (Outcome::read(said.first_chunk().unwrap()), energies[0].sent);
    assert_eq!((outcome.bytes, outcome.refused, outcome.kept), (payload.len() as u64, false, k));
    assert!((outcome.sent - sent).abs() <= 1e-12 * sent, "{outcome:?}");
    assert_eq!(said[OUTCOME_BYTES as usize..][..4], [0; 4]);
}

#[test]
fn bad_calls_are_refused() {
    let Some(device) = Emulated::new(0) else { return };
    let (payloads, out, counts, refused) = (Memory::new(600), Memory::new(4000), Memory::new(64), Memory::new(4));
    let good = Lists { n: 1000, k: 10, payloads: payloads.span(), stride: 100, ranks: 2 };
    let room = ListRoom { counts: counts.span(), refused: refused.span() };
    let call = |lists: &Lists, out: Span, room: &ListRoom| {
        add_lists(&device, lists, Target { scale: 1.0, out }, room).unwrap_err()
    };
    let text = |error: LaunchError| error.to_string();
    assert!(text(call(&Lists { k: 1001, ..good }, out.span(), &room)).contains("k = 1001: at most n"));
    assert!(text(call(&Lists { stride: 20, ..good }, out.span(), &room)).contains("as long as a payload"));
    assert!(text(call(&Lists { ranks: 0, ..good }, out.span(), &room)).contains("at least 1 rank"));
    assert!(text(call(&Lists { ranks: 7, ..good }, out.span(), &room)).contains("the payloads of 600 bytes"));
    assert!(matches!(call(&Lists { n: 1 << 31, ..good }, out.span(), &room), LaunchError::TooLong(_)));
    assert!(text(call(&good, out.span().part(0, 3996), &room)).contains("out of 3996 bytes"));
    let few = ListRoom { counts: counts.span().part(0, 4), ..room };
    assert!(text(call(&good, out.span(), &few)).contains("the counts of 4 bytes: 8 are needed"));
    let same = ListRoom { refused: out.span().part(0, 4), ..room };
    assert_eq!(call(&good, out.span(), &same), LaunchError::Overlap("the word for what is refused", "out"));
    let odd = ListRoom { counts: counts.span().part(2, 60), ..room };
    assert!(matches!(call(&good, out.span(), &odd), LaunchError::Misaligned { need: 4, .. }));
}
