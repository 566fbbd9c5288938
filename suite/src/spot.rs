//! Whether kept curves are what this program trains here: the first steps of two settings are trained anew.

use crate::files;
use crate::fixed::{self, Curve, Curves, DENSE, Library, TEST_EVERY};
use crate::ranks::Recipe;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A sum, and a gather whose sizes do not depend on the values.
const SETTINGS: [&str; 2] = [DENSE, "topk(k=0.01)+ef(vanilla)/allgather"];

/// Trains a job's first steps, a test interval of them, by dense and by top-k, and compares test losses and bytes. A check that passed
/// with the same curves and program is remembered beside the curves that are trained here.
///
/// # Errors
/// A curve that shows something else: it is of another program, of other images or of another kind of processor.
pub fn check(library: &Library, recipe: &Recipe, curves: &Curves, binary: &str) -> Result<()> {
    // Cells of one job come at once: the second finds what the first has left.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _only = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (passed, digest) = (fixed::file(&library.trained.join("checked"), recipe), files::digest(&(curves, binary))?);
    if files::read_json::<String>(&passed).ok().as_ref() == Some(&digest) {
        return Ok(());
    }
    let data = library.data.of(recipe.world)?;
    let kept = fixed::file(&library.kept, recipe);
    let path = if kept.exists() { kept } else { fixed::file(&library.trained, recipe) };
    for curve in SETTINGS.into_iter().filter_map(|setting| curves.of(setting).ok()) {
        let setting = &curve.setting;
        let strategy = setting.parse().with_context(|| format!("read the strategy {setting}"))?;
        compare(curve, &fixed::train_until(TEST_EVERY, *recipe, &data, &(setting.clone(), strategy))?, &path)?;
    }
    files::write_json(&passed, &digest)
}

fn compare(curve: &Curve, begun: &Curve, path: &Path) -> Result<()> {
    let losses = &curve.losses[..curve.losses.len().min(begun.losses.len())];
    let (bytes, begun_bytes) = (bytes(curve), bytes(begun));
    ensure!(
        losses == begun.losses && bytes == begun_bytes,
        "{}: {} has the test losses {losses:?} and bytes {bytes:?}, and trained here {:?} and {begun_bytes:?}: the curves are of \
         another program, of other images or of another kind of processor. Remove the file, and its curves are trained anew \
         (minutes)",
        path.display(),
        curve.setting,
        begun.losses
    );
    Ok(())
}

/// By bucket and collective.
fn bytes(curve: &Curve) -> Vec<Vec<f64>> {
    curve.rounds.iter().map(|bucket| bucket.iter().map(|round| round.bytes).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixed::Shared;
    use crate::ranks::Model;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn curves_that_are_not_what_is_trained_here_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = Recipe {
            model: Model::Convolutional,
            world: 2,
            momentum: 0.9,
            learning_rate: 0.05,
            batch: 32,
            steps: 50,
            seed: 1,
        };
        let library = |images: &[usize]| {
            let path = |name: &str| folder.path().join(name);
            Library::new(path("kept"), path("trained"), Shared::synthetic(images), Arc::new(AtomicBool::new(false)))
        };
        let data = library(&[2]).data.of(2).unwrap();
        let train = |setting: &str| fixed::train(recipe, &data, &(setting.to_owned(), setting.parse().unwrap()));
        let curves = Curves { recipe, curves: SETTINGS.map(|setting| train(setting).unwrap()).to_vec() };
        curves.write(&folder.path().join("kept")).unwrap();
        let refused = |change: &dyn Fn(&mut Curve)| {
            let mut other = curves.clone();
            change(&mut other.curves[1]);
            format!("{:#}", check(&library(&[2]), &recipe, &other, "a").unwrap_err())
        };
        for error in [refused(&|curve| curve.losses[1] *= 1.001), refused(&|curve| curve.rounds[1][0].bytes += 1.0)] {
            for part in ["kept/convolutional-n2-m0.9-lr0.05-b32-t50-s1.json: topk(k=0.01)", "Remove the file"] {
                assert!(error.contains(part), "no {part:?} in {error}");
            }
        }
        check(&library(&[2]), &recipe, &curves, "a").unwrap();
        // Without images nothing can be trained: remembered, for these curves and this program.
        check(&library(&[]), &recipe, &curves, "a").unwrap();
        assert!(check(&library(&[]), &recipe, &curves, "b").is_err());
        assert!(refused(&|curve| curve.losses[0] *= 1.001).contains("Remove the file"));
    }
}
