"""Single pictures: facts about a file, and its pixels as eight-bit red, green and blue, turned as viewers show them.

``PictureFacts`` come from the header of a file, and only pictures of 16 bits are decoded for them. How many bits such a
picture uses is not written anywhere (X-ray and microscopes use 10 to 14 of 16), so that it is taken from the largest
value of the whole data set, see ``bits_of``.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.files import explain_read_errors
from cpt_lab.data.report import DataReport, list_counts, list_first, pluralize

# of torchvision's ImageFolder, and others that Pillow reads without further libraries
IMAGE_ENDINGS = tuple(
    ".jpg .jpeg .jpe .jfif .png .bmp .ppm .pgm .pbm .pnm .tif .tiff .webp".split()
)
UNREAD_ENDINGS = tuple(  # of pictures that are not read
    ".gif .heic .heif .hif .avif .jxl .jp2 .j2k .jpx .svg .eps .pdf .ico .icns .tga .dds .exr .hdr .psd .xcf .raw .dng "
    ".cr2 .cr3 .nef .arw .orf .rw2 .dcm .nii .fits .pcx .sgi .apng .mpo .fli .xbm .xpm".split()
)
ORIENTATION = 0x0112  # EXIF tag: how a viewer must turn the picture
TRANSPOSE_METHODS = {  # its values, but for 1 ("as it is") -> methods of PIL.Image.Transpose
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
FULL_GREY_BITS = 16
CONVERSIONS = {  # PIL's mode -> what becomes of it
    "L": "grey became three equal channels",
    "LA": "grey became three equal channels",
    "1": "1 bit became 0 and 255",
    "P": "a palette became its colours",
    "PA": "a palette became its colours",
}


class ImageFacts(NamedTuple):
    """Facts about the file of one picture."""

    width: int  # in pixels, as stored, before any turn
    height: int
    mode: str  # PIL's
    format: str  # PIL's
    depth: int  # bits per channel that the file has room for, 8 where there are fewer
    largest: int  # largest value of a picture of 16 bits, of its upper 8 bits where it has colours; else 0
    orientation: int  # EXIF's, 1 where there is none
    frames: int  # pages or frames
    has_transparency: bool
    has_damaged_exif: bool  # so that its orientation is not known
    has_profile: bool  # a colour profile, which is not applied

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width as stored."""
        return self.height, self.width

    @property
    def shown_size(self) -> tuple[int, int]:
        """Height and width as viewers show them."""
        return (
            (self.width, self.height)
            if self.orientation >= 5
            else (self.height, self.width)
        )

    @property
    def is_deep_grey(self) -> bool:
        """Return whether the picture is grey with more than 8 bits."""
        return _is_deep_grey(self.mode)


def open_rgb(path: Path | str, bits: int | None = None, turn: bool = True) -> Any:
    """Return the picture in a file in PIL's mode RGB.

    Args:
        path: the file.
        bits: of grey pictures of 16 bits that are in use, see ``bits_of``; None takes those of this picture.
        turn: apply the orientation of EXIF, as viewers do.

    Raises:
        ValueError: names a file that is damaged.
    """
    with (
        explain_read_errors(Path(path)),
        import_optional("PIL.Image", "vision").open(path) as image,
    ):
        return to_upright_rgb(image, bits, turn)


def to_upright_rgb(image: Any, bits: int | None = None, turn: bool = True) -> Any:
    """Return a picture of PIL that was not loaded yet in mode RGB, turned as its EXIF orientation has it."""
    orientation = exif_orientation(image)
    if image.format == "TIFF" and orientation > 1 and not turn:
        raise ValueError(
            f"a TIFF file with EXIF orientation {orientation} is always turned; save it as .png"
        )
    return apply_orientation(
        to_rgb(image, bits), orientation if turn else 1, image.format
    )


def apply_orientation(image: Any, orientation: int, kind: str | None) -> Any:
    """Return a picture of PIL turned by an EXIF orientation; those from TIFF files were turned when PIL loaded them."""
    if orientation == 1 or kind == "TIFF":
        return image
    return image.transpose(
        import_optional("PIL.Image", "vision").Transpose[TRANSPOSE_METHODS[orientation]]
    )


def to_rgb(image: Any, bits: int | None = None) -> Any:
    """Return a picture of PIL in mode RGB: grey ones get three equal channels, transparency is left out.

    Grey pictures of 16 bits are scaled to eight: PIL alone would cut off all above 255.

    Args:
        image: a picture of PIL.
        bits: of grey pictures of 16 bits that are in use; None takes those that hold the largest value.

    Raises:
        ValueError: for pictures whose range of values is not known: 32-bit and floating ones.
    """
    if _is_deep_grey(image.mode):
        values = _deep_values(image)
        if bits is None:
            bits = _bits_holding(
                int(values.max()), "a picture of 16 bits whose values end"
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
    if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError(
            f"a picture of 8 or 16 bits expected, got PIL's mode {image.mode}; save it with 8 bits"
        )
    return values


def _bits_holding(largest: int, what: str, them: str = "it") -> int:
    """Return the number of bits that hold a value, 16 for black pictures; ValueError where it would be black."""
    if 0 < largest < 256:
        raise ValueError(f"{what} at {largest} would be black; save {them} with 8 bits")
    return largest.bit_length() or FULL_GREY_BITS


def exif_orientation(image: Any) -> int:
    """Return the EXIF orientation of a picture, 1 where there is none that PIL can read."""
    return _read_orientation(image)[0]


def _read_orientation(image: Any) -> tuple[int, bool]:
    """Return the EXIF orientation of a picture, and whether it has EXIF data that PIL cannot read."""
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1, False
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # PIL warns of damaged EXIF data, which the report does
        try:
            tags = dict(image.getexif())
        except Exception:  # EXIF is written by anybody, and PIL raises nearly anything over damaged ones
            return 1, True
    value = tags.get(ORIENTATION, 1)
    return (
        value if value in TRANSPOSE_METHODS else 1
    ), "exif" in image.info and not tags


def inspect_image_file(path: Path) -> ImageFacts:
    """Return facts about a picture; ValueError for a file that breaks off: it is noticed here, before any training."""
    with (
        explain_read_errors(path),
        import_optional("PIL.Image", "vision").open(path) as image,
    ):
        facts = inspect_open_image(image)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            if (
                image.format != "JPEG" or END_OF_JPEG not in file.read()
            ):  # an unusual end: look at all of it
                image.load()
        return facts


def inspect_open_image(image: Any) -> ImageFacts:
    """Return facts about a picture of PIL that was not loaded yet; those of 16 bits are."""
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
    if image.format == "TIFF" and orientation > 1:
        image.load()  # PIL turns it now
        shown_height, shown_width = image.height, image.width
        stored = (
            (shown_width, shown_height)
            if orientation >= 5
            else (shown_height, shown_width)
        )
    else:
        stored = (image.height, image.width)
    return ImageFacts(
        width=stored[1],
        height=stored[0],
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


def grey_bits(dataset: str, pictures: Mapping[str, ImageFacts]) -> int | None:
    """Return how many of 16 bits the grey pictures of a data set use; None where no picture has 16 bits.

    Args:
        dataset: its name, for the errors.
        pictures: facts about all its pictures, by name.

    Raises:
        ValueError: where the scale cannot be known: colours that use fewer bits, and a mixture of depths.
    """
    deep_colours = {
        name: p
        for name, p in pictures.items()
        if p.depth == FULL_GREY_BITS and not p.is_deep_grey
    }
    upper = max((p.largest for p in deep_colours.values()), default=255)
    if 0 < upper < 128:
        raise ValueError(
            f"{dataset}: {pluralize(len(deep_colours), 'colour picture')} of 16 bits per channel, whose values end "
            f"below {256 * (upper + 1):,} of 65,535, would be dark; save them with 8 bits per channel "
            f"({list_first(sorted(deep_colours))})"
        )
    deep = {name: p for name, p in pictures.items() if p.is_deep_grey}
    if not deep:
        return None
    largest = max(p.largest for p in deep.values())
    bits = _bits_holding(
        largest,
        f"{dataset}: {pluralize(len(deep), 'picture')} of 16 bits whose values end",
        "them",
    )
    others = sorted(set(pictures) - set(deep))
    if others and bits < FULL_GREY_BITS:
        raise ValueError(
            f"{dataset}: {pluralize(len(deep), 'grey picture')} of 16 bits whose values end at {largest:,} "
            f"({list_first(sorted(deep))}) stand beside {len(others):,} of 8 bits ({list_first(others)}), and nothing "
            "says which value is white in both; save all with 8 bits"
        )
    return bits


def report_image_files(
    report: DataReport, pictures: Mapping[str, ImageFacts], bits: int | None
) -> None:
    """Add facts about the files of pictures, by name: formats, modes, sizes, and what is converted.

    Args:
        report: of their data set.
        pictures: facts about each file, in the order of training and test.
        bits: that grey pictures of 16 bits use, see ``bits_of``.
    """
    found = list(pictures.values())
    formats, modes = Counter(p.format for p in found), Counter(p.mode for p in found)
    report.add(
        "read",
        f"{pluralize(len(found), 'picture')}: formats {list_counts(formats)}; PIL's modes {list_counts(modes)}; "
        f"{describe_sizes([p.shown_size for p in found])}",
    )
    _report_matching(
        report,
        "read",
        pictures,
        lambda p: p.has_profile,
        "with a colour profile, which is not applied",
    )
    _report_matching(
        report,
        "read",
        pictures,
        lambda p: p.has_damaged_exif,
        "with EXIF data that cannot be read: not turned",
    )
    _report_conversions(report, pictures)
    _report_depth(report, pictures, bits)
    _report_matching(
        report,
        "changed",
        pictures,
        lambda p: p.frames > 1,
        "of several frames or pages: the first alone is read",
    )


def report_orientation(report: DataReport, pictures: Mapping[str, ImageFacts]) -> None:
    """Add a fact about the pictures that are turned as their EXIF orientation has it."""
    turned = {name: p for name, p in pictures.items() if p.orientation > 1}
    numbers = Counter(p.orientation for p in turned.values())
    kinds = ", ".join(
        f"orientation {number}: {numbers[number]:,}" for number in sorted(numbers)
    )
    if turned:
        report.add(
            "changed",
            f"EXIF orientation applied to {pluralize(len(turned), 'picture')}, as viewers do "
            f"({kinds}; {list_first(sorted(turned))})",
        )


def describe_sizes(sizes: list[tuple[int, int]]) -> str:
    """Return the range of sizes, width x height.

    >>> describe_sizes([(20, 30), (20, 30)]), describe_sizes([(20, 30), (8, 40)])
    ('all 30 x 20 pixels', '2 sizes, 30 to 40 pixels wide and 8 to 20 high')
    >>> describe_range(8, 8)
    '8'
    """
    different = set(sizes)
    heights, widths = zip(*different, strict=True)
    if len(different) == 1:
        return f"all {widths[0]} x {heights[0]} pixels"
    wide, high = (
        describe_range(min(widths), max(widths)),
        describe_range(min(heights), max(heights)),
    )
    return f"{len(different):,} sizes, {wide} pixels wide and {high} high"


def describe_range(low: float, high: float) -> str:
    """Return "low to high" with two digits behind the point at most, or one number where they are equal."""
    first, last = (f"{round(value, 2):g}" for value in (low, high))
    return first if first == last else f"{first} to {last}"


def _report_conversions(report: DataReport, pictures: Mapping[str, ImageFacts]) -> None:
    for mode in sorted(
        {p.mode for p in pictures.values() if p.mode != "RGB" and not p.is_deep_grey}
    ):
        change = CONVERSIONS.get(
            mode,
            "colours became red, green and blue, by PIL's rules and without a profile",
        )
        if mode not in TRANSPARENT_MODES or mode in CONVERSIONS:
            of_mode = {
                name: facts for name, facts in pictures.items() if facts.mode == mode
            }
            _report_matching(
                report,
                "changed",
                of_mode,
                lambda _: True,
                f"of PIL's mode {mode}: {change}",
            )
    modes = Counter(p.mode for p in pictures.values() if p.has_transparency)
    _report_matching(
        report,
        "changed",
        pictures,
        lambda p: p.has_transparency,
        f"with transparency ({list_counts(modes)}): it is left out, and the colours beneath are seen",
    )


def _report_depth(
    report: DataReport, pictures: Mapping[str, ImageFacts], bits: int | None
) -> None:
    deep = [p.largest for p in pictures.values() if p.is_deep_grey]
    if deep and bits is not None:
        report.add(
            "changed",
            f"{pluralize(len(deep), 'grey picture')} of 16 bits, values up to {max(deep):,}: read as {bits} bits, "
            "scaled to 8, three equal channels",
        )
    _report_matching(
        report,
        "changed",
        pictures,
        lambda p: p.depth == FULL_GREY_BITS and not p.is_deep_grey,
        "with 16 bits per channel: the upper 8 are read",
    )


def _report_matching(
    report: DataReport,
    topic: str,
    pictures: Mapping[str, ImageFacts],
    applies: Callable[[ImageFacts], bool],
    text: str,
) -> None:
    """Add a fact on the pictures it applies to, with their number and first names, where there are any."""
    names = sorted(name for name, facts in pictures.items() if applies(facts))
    if names:
        report.add(
            topic, f"{pluralize(len(names), 'picture')} {text} ({list_first(names)})"
        )
