"""Decoding of image files: facts about a file, and its pixels as eight-bit RGB, turned as viewers show them.

``ImageFacts`` come from the header of a file; only 16-bit images are decoded for them. How many of its 16 bits such an
image uses is not written anywhere (X-ray and microscopes use 10 to 14), so ``grey_bits`` infers the number from the
largest value in the whole data set. ``open_rgb`` reads a file; the ``report_*`` functions add facts to a data report.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.files import explain_read_errors
from cpt_lab.data.report import DataReport, list_counts, list_first, pluralize

# The endings of torchvision's ImageFolder, and of other formats that Pillow reads without further libraries.
IMAGE_ENDINGS = tuple(
    ".jpg .jpeg .jpe .jfif .png .bmp .ppm .pgm .pbm .pnm .tif .tiff .webp".split()
)
# Endings of image formats that are not read.
UNREAD_ENDINGS = tuple(
    ".gif .heic .heif .hif .avif .jxl .jp2 .j2k .jpx .svg .eps .pdf .ico .icns .tga .dds .exr .hdr .psd .xcf .raw .dng "
    ".cr2 .cr3 .nef .arw .orf .rw2 .dcm .nii .fits .pcx .sgi .apng .mpo .fli .xbm .xpm".split()
)
ORIENTATION = 0x0112  # EXIF tag: how a viewer must turn the image
# Orientations, except 1 ("not turned") -> methods of PIL.Image.Transpose.
TRANSPOSE_METHODS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
TRANSPARENT_MODES = ("RGBA", "RGBa", "LA", "La", "PA")
END_OF_JPEG = b"\xff\xd9"
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0  # tag of TIFF, and its value
DARK_BITS = 3  # that a dark image leaves unused
FULL_GREY_BITS = 16
# PIL's mode -> how the image is converted.
CONVERSIONS = {
    "L": "grey became three equal channels",
    "LA": "grey became three equal channels",
    "1": "1 bit became 0 and 255",
    "P": "a palette became its colours",
    "PA": "a palette became its colours",
}


class ImageFacts(NamedTuple):
    """Facts about the file of one image.

    Attributes:
        width: width in pixels as stored, before any turn.
        height: height in pixels as stored.
        mode: PIL's mode.
        format: PIL's format.
        depth: bits per channel that the file has room for; 8 also where there are fewer.
        largest: largest value of a 16-bit image; in colour images the largest of the upper 8 bits; 0 for other images.
        orientation: EXIF orientation, 1 without one.
        frames: number of pages or frames.
        has_transparency: whether there is an alpha channel or a transparent colour.
        has_damaged_exif: whether EXIF data cannot be read, so that the orientation is not known.
        has_profile: whether there is a colour profile, which is not applied.
    """

    width: int
    height: int
    mode: str
    format: str
    depth: int
    largest: int
    orientation: int
    frames: int
    has_transparency: bool
    has_damaged_exif: bool
    has_profile: bool

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width as stored."""
        return self.height, self.width

    @property
    def shown_size(self) -> tuple[int, int]:
        """Height and width as viewers show them."""
        if self.orientation >= 5:
            return self.width, self.height
        return self.height, self.width

    @property
    def is_deep_grey(self) -> bool:
        """True for a grey image with more than 8 bits."""
        return _is_deep_grey(self.mode)


def open_rgb(path: Path | str, bits: int | None = None, turn: bool = True) -> Any:
    """Return the image in a file as a PIL image of mode RGB.

    Args:
        path: the file.
        bits: number of bits that 16-bit grey images use, see ``grey_bits``; None takes that of this image.
        turn: apply the EXIF orientation, as viewers do.

    Raises:
        ValueError: names a file that is damaged.
    """
    with (
        explain_read_errors(Path(path)),
        import_optional("PIL.Image", "vision").open(path) as image,
    ):
        return to_upright_rgb(image, bits, turn)


def to_upright_rgb(image: Any, bits: int | None = None, turn: bool = True) -> Any:
    """Return a PIL image in mode RGB, turned by its EXIF orientation; it must not have been loaded yet."""
    orientation = exif_orientation(image)
    if image.format == "TIFF" and orientation > 1 and not turn:
        raise ValueError(
            f"a TIFF file with EXIF orientation {orientation} is always turned; save it as .png"
        )
    return apply_orientation(
        to_rgb(image, bits), orientation if turn else 1, image.format
    )


def apply_orientation(image: Any, orientation: int, file_format: str | None) -> Any:
    """Return a PIL image turned by an EXIF orientation; PIL has already turned images from TIFF files."""
    if orientation == 1 or file_format == "TIFF":
        return image
    transpose = import_optional("PIL.Image", "vision").Transpose
    return image.transpose(transpose[TRANSPOSE_METHODS[orientation]])


def to_rgb(image: Any, bits: int | None = None) -> Any:
    """Return a PIL image in mode RGB: grey images get three equal channels, transparency is dropped.

    16-bit grey images are scaled to eight bits: PIL alone would clip all values above 255.

    Args:
        image: a PIL image.
        bits: number of bits that 16-bit grey images use; None takes the number that holds the largest value.

    Raises:
        ValueError: for images whose range of values is not known: 32-bit and floating-point ones.
    """
    if _is_deep_grey(image.mode):
        values = _deep_values(image)
        if bits is None:
            bits = _bits_holding(
                int(values.max()), "an image of 16 bits whose values end"
            )
        scaled = np.minimum(values >> (bits - 8), 255)
        image = import_optional("PIL.Image", "vision").fromarray(
            scaled.astype(np.uint8)
        )
    return image.convert("RGB")


def _is_deep_grey(mode: str) -> bool:
    return mode.startswith("I") or mode == "F"


def _deep_values(image: Any) -> np.ndarray:
    values = np.asarray(image)
    if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO:
        raise ValueError(
            "a TIFF image of 16 bits in which 0 is white (photometric interpretation 0); save it with 0 as black"
        )
    if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError(
            f"an image of 8 or 16 bits expected, got PIL's mode {image.mode}; save it with 8 bits"
        )
    return values


def _bits_holding(largest: int, images: str, pronoun: str = "it") -> int:
    """Return the number of bits that hold a value, 16 for black images.

    Args:
        largest: largest value of the images.
        images: their description in the error, up to the largest value.
        pronoun: pronoun for them in the error.

    Raises:
        ValueError: for a value below 256, with which the images would be black.
    """
    if 0 < largest < 256:
        raise ValueError(
            f"{images} at {largest} would be black; save {pronoun} with 8 bits"
        )
    return largest.bit_length() or FULL_GREY_BITS


def exif_orientation(image: Any) -> int:
    """Return the EXIF orientation of an image, 1 if PIL can read none."""
    return _read_orientation(image)[0]


def _read_orientation(image: Any) -> tuple[int, bool]:
    """Return the EXIF orientation of an image, and whether it has EXIF data that PIL cannot read."""
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1, False
    with warnings.catch_warnings():
        # PIL warns of damaged EXIF data, which the data report states.
        warnings.simplefilter("ignore")
        try:
            tags = dict(image.getexif())
        except Exception:  # PIL raises nearly anything over damaged EXIF data
            return 1, True
    orientation = tags.get(ORIENTATION, 1)
    if orientation not in TRANSPOSE_METHODS:
        orientation = 1
    return orientation, "exif" in image.info and not tags


def inspect_image_file(path: Path) -> ImageFacts:
    """Return facts about an image file; ValueError for a truncated file, before any training."""
    with (
        explain_read_errors(path),
        import_optional("PIL.Image", "vision").open(path) as image,
    ):
        facts = inspect_open_image(image)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            ends_as_jpeg = image.format == "JPEG" and END_OF_JPEG in file.read()
        # Any other file is decoded, to see whether it is complete.
        if not ends_as_jpeg:
            image.load()
        return facts


def inspect_open_image(image: Any) -> ImageFacts:
    """Return facts about a PIL image that was not loaded yet; this loads 16-bit images."""
    has_deep_channels = ";16" in str([tile[3] for tile in image.tile])
    frames = getattr(image, "n_frames", 1)
    orientation, has_damaged_exif = _read_orientation(image)
    has_transparency = image.mode in TRANSPARENT_MODES or "transparency" in image.info
    mode, has_profile = image.mode, bool(image.info.get("icc_profile"))
    largest = 0
    if _is_deep_grey(mode):
        largest = int(_deep_values(image).max())
    elif has_deep_channels:
        largest = max(high for _, high in _channel_extrema(image))
    height, width = image.height, image.width
    if image.format == "TIFF" and orientation > 1:
        image.load()  # loading turns the image
        height, width = image.height, image.width
        if orientation >= 5:
            height, width = width, height
    return ImageFacts(
        width=width,
        height=height,
        mode=mode,
        format=image.format or "unknown",
        depth=16 if has_deep_channels or _is_deep_grey(mode) else 8,
        largest=largest,
        orientation=orientation,
        frames=frames,
        has_damaged_exif=has_damaged_exif,
        has_transparency=has_transparency,
        has_profile=has_profile,
    )


def _channel_extrema(image: Any) -> list[tuple[int, int]]:
    return image.convert("RGB").getextrema()


def grey_bits(dataset: str, images: Mapping[str, ImageFacts]) -> int | None:
    """Return how many of 16 bits the grey images of a data set use; None if no image has 16 bits.

    Args:
        dataset: name of the data set, for the errors.
        images: facts about all its images, by name.

    Raises:
        ValueError: if the scale cannot be known: colours that use fewer bits, and a mixture of depths.
    """
    deep_colours = {
        name: p
        for name, p in images.items()
        if p.depth == FULL_GREY_BITS and not p.is_deep_grey
    }
    upper = max((p.largest for p in deep_colours.values()), default=255)
    if 0 < upper < 128:
        raise ValueError(
            f"{dataset}: {pluralize(len(deep_colours), 'colour image')} of 16 bits per channel, whose values end "
            f"below {256 * (upper + 1):,} of 65,535, would be dark; save them with 8 bits per channel "
            f"({list_first(sorted(deep_colours))})"
        )
    deep = {name: p for name, p in images.items() if p.is_deep_grey}
    if not deep:
        return None
    largest = max(p.largest for p in deep.values())
    bits = _bits_holding(
        largest,
        f"{dataset}: {pluralize(len(deep), 'image')} of 16 bits whose values end",
        "them",
    )
    eight_bit = sorted(set(images) - set(deep))
    if eight_bit and bits < FULL_GREY_BITS:
        raise ValueError(
            f"{dataset}: {pluralize(len(deep), 'grey image')} of 16 bits whose values end at {largest:,} "
            f"({list_first(sorted(deep))}) stand beside {len(eight_bit):,} of 8 bits ({list_first(eight_bit)}), and "
            "nothing says which value is white in both; save all with 8 bits"
        )
    return bits


def report_image_files(
    report: DataReport, images: Mapping[str, ImageFacts], bits: int | None
) -> None:
    """Add facts about image files: formats, modes, sizes, and what is converted.

    Args:
        report: gets the facts.
        images: facts about each file by its name, first the training files, then the test files.
        bits: number of bits that 16-bit grey images use, see ``grey_bits``.
    """
    formats = Counter(image.format for image in images.values())
    modes = Counter(image.mode for image in images.values())
    sizes = [image.shown_size for image in images.values()]
    report.add(
        "read",
        f"{pluralize(len(images), 'image')}: formats {list_counts(formats)}; PIL's modes {list_counts(modes)}; "
        f"{describe_sizes(sizes)}",
    )
    with_profile = [name for name, image in images.items() if image.has_profile]
    _report_named(
        report, "read", with_profile, "with a colour profile, which is not applied"
    )
    with_damaged_exif = [
        name for name, image in images.items() if image.has_damaged_exif
    ]
    _report_named(
        report,
        "read",
        with_damaged_exif,
        "with EXIF data that cannot be read: not turned",
    )
    _report_conversions(report, images)
    _report_depth(report, images, bits)
    with_frames = [name for name, image in images.items() if image.frames > 1]
    _report_named(
        report,
        "changed",
        with_frames,
        "of several frames or pages: the first alone is read",
    )


def report_orientation(report: DataReport, images: Mapping[str, ImageFacts]) -> None:
    """Add a fact about the images that are turned by their EXIF orientation."""
    turned = {name: image for name, image in images.items() if image.orientation > 1}
    if not turned:
        return
    counts = Counter(image.orientation for image in turned.values())
    orientations = ", ".join(
        f"orientation {number}: {counts[number]:,}" for number in sorted(counts)
    )
    report.add(
        "changed",
        f"EXIF orientation applied to {pluralize(len(turned), 'image')}, as viewers do "
        f"({orientations}; {list_first(sorted(turned))})",
    )


def describe_sizes(sizes: list[tuple[int, int]]) -> str:
    """Return the range of sizes (height, width), as width x height.

    >>> describe_sizes([(20, 30), (20, 30)]), describe_sizes([(20, 30), (8, 40)])
    ('all 30 x 20 pixels', '2 sizes, 30 to 40 pixels wide and 8 to 20 high')
    >>> describe_range(8, 8)
    '8'
    """
    different = set(sizes)
    heights, widths = zip(*different, strict=True)
    if len(different) == 1:
        return f"all {widths[0]} x {heights[0]} pixels"
    width_range = describe_range(min(widths), max(widths))
    height_range = describe_range(min(heights), max(heights))
    return (
        f"{len(different):,} sizes, {width_range} pixels wide and {height_range} high"
    )


def describe_range(low: float, high: float) -> str:
    """Return "low to high" with at most two decimal places, or one number if they are equal."""
    first, last = (f"{round(value, 2):g}" for value in (low, high))
    return first if first == last else f"{first} to {last}"


def _report_conversions(report: DataReport, images: Mapping[str, ImageFacts]) -> None:
    names_by_mode: dict[str, list[str]] = defaultdict(list)
    for name, image in images.items():
        if image.mode != "RGB" and not image.is_deep_grey:
            names_by_mode[image.mode].append(name)
    for mode, names in sorted(names_by_mode.items()):
        if mode in TRANSPARENT_MODES and mode not in CONVERSIONS:
            continue
        change = CONVERSIONS.get(
            mode,
            "colours became red, green and blue, by PIL's rules and without a profile",
        )
        _report_named(report, "changed", names, f"of PIL's mode {mode}: {change}")

    transparent = {
        name: image for name, image in images.items() if image.has_transparency
    }
    modes = Counter(image.mode for image in transparent.values())
    _report_named(
        report,
        "changed",
        list(transparent),
        f"with transparency ({list_counts(modes)}): it is left out, and the colours beneath are seen",
    )


def _report_depth(
    report: DataReport, images: Mapping[str, ImageFacts], bits: int | None
) -> None:
    deep_grey = [image.largest for image in images.values() if image.is_deep_grey]
    if deep_grey and bits is not None:
        report.add(
            "changed",
            f"{pluralize(len(deep_grey), 'grey image')} of 16 bits, values up to {max(deep_grey):,}: read as {bits} "
            "bits, scaled to 8, three equal channels",
        )
        dark = [
            name
            for name, image in images.items()
            if image.is_deep_grey and image.largest.bit_length() <= bits - DARK_BITS
        ]
        if 2 * len(dark) > len(deep_grey):
            _report_named(
                report,
                "changed",
                dark,
                f"are dark beside the brightest ones: their values end below {2 ** (bits - DARK_BITS):,}",
            )
    deep_colour = [
        name
        for name, image in images.items()
        if image.depth == FULL_GREY_BITS and not image.is_deep_grey
    ]
    _report_named(
        report, "changed", deep_colour, "with 16 bits per channel: the upper 8 are read"
    )


def _report_named(
    report: DataReport, topic: str, names: Sequence[str], text: str
) -> None:
    """Add a fact about images, with their number and first names, if there are any."""
    if names:
        report.add(
            topic,
            f"{pluralize(len(names), 'image')} {text} ({list_first(sorted(names))})",
        )
