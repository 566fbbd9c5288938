//! Fashion-MNIST from idx.gz files (Debian package dataset-fashion-mnist), cut into one shard per rank.

use anyhow::{Error, Result, anyhow};
use flate2::read::GzDecoder;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Pixels of an image.
pub const PIXELS: usize = 28 * 28;

/// Classes of images.
pub const CLASSES: usize = 10;

/// Where the Debian package puts the files.
pub const DEFAULT_FOLDER: &str = "/usr/share/datasets/fashion-mnist";

/// Most images in a file: bounds what a broken header can make us read.
const MAX_IMAGES: u32 = 1_000_000;

const IMAGES_MAGIC: u32 = 0x0803;
const LABELS_MAGIC: u32 = 0x0801;

/// Labelled images.
#[derive(Debug, Clone, Default)]
pub struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl Images {
    /// How many.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Made up: each class lights its own block of pixels, with noise. For tests without files.
    pub fn synthetic(count: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut images = Self::default();
        for i in 0..count {
            let label = (i % CLASSES) as u8;
            let bright = |pixel: usize| pixel / 78 == usize::from(label);
            images.pixels.extend((0..PIXELS).map(|p| rng.random_range(0..120u8) + if bright(p) { 120 } else { 0 }));
            images.labels.push(label);
        }
        images
    }

    /// Writes image `index` as values in [0, 1] and answers its label.
    pub fn load(&self, index: usize, into: &mut [f32]) -> u8 {
        let pixels = &self.pixels[index * PIXELS..(index + 1) * PIXELS];
        into.iter_mut().zip(pixels).for_each(|(value, pixel)| *value = f32::from(*pixel) / 255.0);
        self.labels[index]
    }

    /// Replaces a batch by these images, one after the other, and their labels.
    pub fn load_batch(&self, indices: impl Iterator<Item = usize>, pixels: &mut Vec<f32>, labels: &mut Vec<u8>) {
        pixels.clear();
        labels.clear();
        for index in indices {
            let start = pixels.len();
            pixels.resize(start + PIXELS, 0.0);
            labels.push(self.load(index, &mut pixels[start..]));
        }
    }

    /// The training images `rank`, `rank + world`, ... of the files in `folder`, and how many there are in all.
    pub fn training_shard(folder: &Path, rank: usize, world: usize) -> Result<(Self, usize)> {
        read(folder, "train", usize::MAX, |i| i % world == rank)
    }

    /// The first `count` held-out images of the files in `folder`.
    pub fn held_out(folder: &Path, count: usize) -> Result<Self> {
        Ok(read(folder, "t10k", count, |_| true)?.0)
    }
}

fn read(folder: &Path, set: &str, most: usize, keep: impl Fn(usize) -> bool) -> Result<(Images, usize)> {
    let (mut pixels, count) = Idx::open(&folder.join(format!("{set}-images-idx3-ubyte.gz")), IMAGES_MAGIC)?;
    let (mut labels, labels_count) = Idx::open(&folder.join(format!("{set}-labels-idx1-ubyte.gz")), LABELS_MAGIC)?;
    if count != labels_count {
        return Err(labels.format("number of labels", u64::from(labels_count), format!("{count}, one per image")));
    }
    for side in ["rows", "columns"] {
        let value = pixels.u32()?;
        if value != 28 {
            return Err(pixels.format(side, u64::from(value), "28".into()));
        }
    }
    let mut images = Images::default();
    let (mut image, mut label) = ([0; PIXELS], [0]);
    for i in 0..(count as usize).min(most) {
        pixels.bytes(&mut image)?;
        labels.bytes(&mut label)?;
        if usize::from(label[0]) >= CLASSES {
            return Err(labels.format("label", u64::from(label[0]), "0 to 9".into()));
        }
        if keep(i) {
            images.pixels.extend_from_slice(&image);
            images.labels.push(label[0]);
        }
    }
    Ok((images, count as usize))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    let remedy = "(Debian: apt install dataset-fashion-mnist; another folder: --data)";
    anyhow!("read {}: {error} {remedy}", path.display())
}

struct Idx {
    path: PathBuf,
    reader: GzDecoder<File>,
}

impl Idx {
    fn open(path: &Path, magic: u32) -> Result<(Self, u32)> {
        let file = File::open(path).map_err(|error| unreadable(path, &error))?;
        let mut idx = Self { path: path.to_owned(), reader: GzDecoder::new(file) };
        let found = idx.u32()?;
        if found != magic {
            return Err(idx.format("magic number", u64::from(found), magic.to_string()));
        }
        let count = idx.u32()?;
        if count == 0 || count > MAX_IMAGES {
            return Err(idx.format("number of items", u64::from(count), format!("1 to {MAX_IMAGES}")));
        }
        Ok((idx, count))
    }

    fn bytes(&mut self, into: &mut [u8]) -> Result<()> {
        self.reader.read_exact(into).map_err(|error| unreadable(&self.path, &error))
    }

    fn u32(&mut self) -> Result<u32> {
        let mut bytes = [0; 4];
        self.bytes(&mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Not an idx file of the expected kind.
    fn format(&self, what: &str, value: u64, expected: String) -> Error {
        anyhow!("read {}: {what} is {value}, expected {expected}", self.path.display())
    }
}

/// In which order a rank's images are visited: a new permutation in each pass. A pure function of seed and
/// position, so that going back to a step needs no generator's state.
#[derive(Debug)]
pub struct Order {
    len: usize,
    seed: u64,
    /// Of this pass.
    pass: u64,
    permutation: Vec<u32>,
}

impl Order {
    /// `seed` should differ between ranks. `len` is above 0.
    pub fn new(len: usize, seed: u64) -> Self {
        let mut order = Self { len, seed, pass: 0, permutation: Vec::new() };
        order.permute(0);
        order
    }

    fn permute(&mut self, pass: u64) {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(pass);
        self.permutation = (0..self.len as u32).collect();
        self.permutation.shuffle(&mut rng);
        self.pass = pass;
    }

    /// The image at a position, counted over all passes.
    pub fn at(&mut self, position: u64) -> usize {
        let pass = position / self.len as u64;
        if pass != self.pass {
            self.permute(pass);
        }
        self.permutation[(position % self.len as u64) as usize] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use std::io::Write;

    fn write(folder: &Path, name: &str, bytes: &[u8]) {
        let mut gz = GzEncoder::new(File::create(folder.join(name)).unwrap(), Compression::fast());
        gz.write_all(bytes).unwrap();
        gz.finish().unwrap();
    }

    fn files(folder: &Path, count: u32, labels: &[u8]) {
        let mut images = Vec::new();
        for word in [IMAGES_MAGIC, count, 28, 28] {
            images.extend(word.to_be_bytes());
        }
        images.extend((0..count as usize * PIXELS).map(|i| (i / PIXELS) as u8));
        write(folder, "train-images-idx3-ubyte.gz", &images);
        let mut bytes = LABELS_MAGIC.to_be_bytes().to_vec();
        bytes.extend((labels.len() as u32).to_be_bytes());
        bytes.extend(labels);
        write(folder, "train-labels-idx1-ubyte.gz", &bytes);
    }

    #[test]
    fn shards_share_all_images_out() {
        let folder = tempfile::tempdir().unwrap();
        files(folder.path(), 7, &[0, 1, 2, 3, 4, 5, 6]);
        let shards: Vec<_> = (0..3).map(|r| Images::training_shard(folder.path(), r, 3).unwrap().0).collect();
        assert_eq!(shards.iter().map(Images::len).collect::<Vec<_>>(), [3, 2, 2]);
        let mut pixels = [0.0; PIXELS];
        assert_eq!(shards[1].load(1, &mut pixels), 4);
        assert_eq!(pixels[0], 4.0 / 255.0);
    }

    #[test]
    fn broken_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = |folder: &Path| Images::training_shard(folder, 0, 1).unwrap_err().to_string();
        assert!(error(folder.path()).contains("dataset-fashion-mnist"));
        files(folder.path(), 2, &[0]);
        assert!(error(folder.path()).contains("number of labels is 1"));
        files(folder.path(), 1, &[10]);
        assert!(error(folder.path()).contains("label is 10, expected 0 to 9"));
        files(folder.path(), 0, &[]);
        assert!(error(folder.path()).contains("number of items is 0"));
        write(folder.path(), "train-images-idx3-ubyte.gz", b"<html>");
        assert!(error(folder.path()).contains("magic number"));
        std::fs::write(folder.path().join("train-images-idx3-ubyte.gz"), "plain").unwrap();
        assert!(error(folder.path()).contains("train-images"));
    }

    #[test]
    fn order_depends_on_position_alone() {
        let mut order = Order::new(50, 7);
        let first: Vec<_> = (0..120).map(|p| order.at(p)).collect();
        let again: Vec<_> = (0..120).rev().map(|p| order.at(p)).rev().collect();
        assert_eq!(first, again);
        let mut pass = first[50..100].to_vec();
        assert_ne!(first[..50], pass[..]);
        pass.sort();
        assert_eq!(pass, (0..50).collect::<Vec<_>>());
        assert_ne!(Order::new(50, 8).at(0) + 100 * Order::new(50, 8).at(1), first[0] + 100 * first[1]);
    }
}
