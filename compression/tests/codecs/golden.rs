//! Messages of version 2 as they were first written: `tests/golden/v2/` holds one for each strategy of the registry. They must
//! be read, and written again to the same bytes. They are also the seeds of the fuzz targets.
//!
//! A new compressor's files are made by `FLEXCOMM_BLESS=1 cargo test -p flexcomm-compression --test codecs golden`, which
//! writes what is missing and touches nothing else. A file that no longer fits means that the format has changed:
//! that takes a new code. Unless what changed is which numbers a sender draws, of which receivers know nothing: files
//! `*-one-per-word.bin` are messages from before two numbers came from a word, `*-two-per-word.bin` from before four did,
//! `*-one-by-one.bin` from before atoms were drawn together, `*-middles.bin` from before SketchML sent means, `*-bucket.bin` from
//! before a method compressed layers one by one, and are read as ever. So are those from before bytes 26 and 27 were used. Of methods with several exchanges a
//! file is the last one's message, which tells nothing without the others: a rank that made these itself reads it. Sketches
//! that save nothing are not read any more (FORMAT.md, versions), and none is kept.

use crate::harness::*;
use flexcomm_compression::Build;
use flexcomm_compression::Layers;
use flexcomm_compression::methods::by_code;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::{Envelope, Writer};
use flexcomm_domain::spec::CompressorSpec;
use std::path::{Path, PathBuf};

const STEP: Step = Step { index: 6, learning_rate: 0.5 };

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// `topk(k=0.01)` becomes `topk-k-0.01`.
fn file(strategy: &CompressorSpec) -> String {
    strategy.to_string().replace(['(', '=', ','], "-").replace([')', '+'], "") + ".bin"
}

/// By whole numbers alone: no machine's logarithm takes part.
fn gradient(n: usize) -> Vec<f32> {
    let stream = Stream::new(2, [2; 4]);
    (0..n as u32).map(|i| (stream.word(i) as i32 >> (8 + i % 13)) as f32 / 65_536.0).collect()
}

fn pipeline(strategy: &CompressorSpec) -> Pipeline {
    let matrix = flexcomm_compression::codec::Shape { rows: 12, cols: 8 };
    let vector = flexcomm_compression::codec::Shape::vector(37);
    let layers = Layers::matrices(&[matrix, vector]).unwrap();
    Pipeline::new(strategy, layers, Member { seed: 4, rank: 1, world: 3, tensor: 2 })
}

/// A rank that went through all rounds alone, and its message of the last one.
fn sender(strategy: &CompressorSpec) -> (Pipeline, Vec<u8>) {
    let mut rank = pipeline(strategy);
    let (gradient, mut out) = (gradient(rank.layers().values()), Writer::new());
    let mut more = rank.compress(Gradient::F32(&gradient), STEP, &mut out).unwrap().more;
    while more {
        let sum = out.bytes().to_vec();
        more = rank.advance(&sum, &mut out).unwrap().more;
    }
    (rank, out.into_vec())
}

/// As the target `payload` reads it: code, example, layers, how many of them, payload.
fn seed(strategy: &CompressorSpec, example: usize, message: &[u8]) -> Vec<u8> {
    let payload = Envelope::parse(message).unwrap().payload;
    [&[strategy.entry().code, example as u8, 96, 37, 0, 1], payload].concat()
}

#[test]
fn golden_messages_are_read_and_written() {
    let bless = std::env::var_os("FLEXCOMM_BLESS").is_some();
    let (golden, seeds) = (folder("tests/golden/v2"), folder("fuzz/seeds/payload"));
    for strategy in every_strategy() {
        let (bytes, name) = (sender(&strategy).1, file(&strategy));
        let path = golden.join(&name);
        if bless && !path.exists() {
            let example = strategy.entry().examples.iter();
            let example =
                example.clone().position(|a| parse(&format!("{}({a})", strategy.compressor().name)) == strategy);
            std::fs::create_dir_all(&golden).unwrap();
            std::fs::create_dir_all(&seeds).unwrap();
            std::fs::write(&path, &bytes).unwrap();
            std::fs::write(seeds.join(&name), seed(&strategy, example.unwrap(), &bytes)).unwrap();
        }
        let kept = std::fs::read(&path);
        let kept =
            kept.unwrap_or_else(|e| panic!("failed to read {}: {e}; FLEXCOMM_BLESS=1 writes it", path.display()));
        // Written before messages said scope, step and draw.
        let unsaid = kept[26..28] == [0; 2];
        let mut bytes = bytes;
        assert_eq!(bytes[26] & 0xbf, 0x80 | STEP.index as u8, "{strategy}");
        if unsaid {
            bytes[26..28].fill(0);
        }
        assert!(kept == bytes, "{strategy} is written differently than in {}", path.display());
    }
}

/// Every file is read by the build of today, also one whose strategy is no example any more; one of several exchanges by a
/// rank that made the earlier ones itself.
#[test]
fn every_golden_file_is_read() {
    let mut count = 0;
    for file in std::fs::read_dir(folder("tests/golden/v2")).unwrap() {
        let (path, mut mean) = (file.unwrap().path(), vec![0.0; 133]);
        let bytes = std::fs::read(&path).unwrap();
        let header = Envelope::parse(&bytes).unwrap().header;
        let entry = by_code(header.method).unwrap_or_else(|| panic!("{}: no such method", path.display()));
        let mut strategy = CompressorSpec::from_numbers(entry.info, header.values()).unwrap();
        if path.to_string_lossy().ends_with("-bucket.bin") {
            strategy = parse(&format!("{strategy}+scope(bucket)"));
        }
        // What a decoder holds from earlier rounds (indices, the factors of a matrix) comes from the rounds themselves.
        let mut rank = if pipeline(&strategy).rounds() > 1 { sender(&strategy).0 } else { pipeline(&strategy) };
        rank.decompress(&bytes, STEP.index, &mut mean).unwrap_or_else(|e| panic!("{}: failed to {e}", path.display()));
        assert!(mean.iter().all(|v| v.is_finite()));
        count += 1;
    }
    assert!(count > 0);
}
