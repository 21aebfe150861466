"""The emoji that the base model learns, their names, and the emoji that it never sees in the 3D style. Chosen by hand.

The list has things that can be drawn and told apart at 100 pixels, named by one or two usual words. It has no people, hands
or moods, no flags, signs or text, and only one of several similar emoji. An entry is the emoji's own name, or `word=the
emoji's own name`.
"""

from __future__ import annotations

CHOICE: dict[str, str] = {
    "animal": """
        monkey=monkey face, gorilla, dog=dog face, wolf, fox, raccoon, cat=cat face, black cat, lion, tiger=tiger face,
        horse=horse face, moose, unicorn, zebra, deer, bison, cow=cow face, pig=pig face, sheep=ewe, goat, camel, giraffe,
        elephant, rhino=rhinoceros, hippo=hippopotamus, mouse=mouse face, rabbit=rabbit face, squirrel=chipmunk, hedgehog,
        bat, bear, polar bear, koala, panda, sloth, kangaroo, turkey, chicken, rooster, chick=baby chick, bird, penguin,
        dove, eagle, duck, swan, owl, flamingo, peacock, parrot, crow=black bird, frog, crocodile, turtle, snake,
        dragon=dragon face, dinosaur=sauropod, t-rex=T-Rex, whale=spouting whale, dolphin, fish, tropical fish,
        pufferfish=blowfish, shark, octopus, seashell=spiral shell, jellyfish, crab, lobster, shrimp, squid, snail,
        butterfly, caterpillar=bug, ant, bee=honeybee, beetle, ladybug=lady beetle, spider""",
    "plant": """
        cherry blossom, lotus, rose, hibiscus, sunflower, daisy=blossom, tulip, seedling, potted plant, pine tree=evergreen
        tree, tree=deciduous tree, palm tree, cactus, clover=shamrock, maple leaf, mushroom, coral, tree stump=wood, bird
        nest=nest with eggs""",
    "food": """
        grapes, melon, watermelon, tangerine, lemon, banana, pineapple, mango, red apple, green apple, pear, peach, cherries,
        strawberry, blueberries, kiwi=kiwi fruit, tomato, coconut, avocado, eggplant, potato, carrot, corn=ear of corn, chili
        pepper=hot pepper, bell pepper, cucumber, lettuce=leafy green, broccoli, garlic, onion, peanuts, pea pod, bread,
        croissant, baguette=baguette bread, pretzel, pancakes, waffle, cheese=cheese wedge, chicken leg=poultry leg,
        steak=cut of meat, bacon, hamburger, french fries, pizza, hot dog, sandwich, taco, egg, fried egg=cooking,
        salad=green salad, popcorn, butter, salt shaker=salt, rice ball, noodles=steaming bowl, spaghetti, sushi, dumpling,
        ice cream=soft ice cream, donut=doughnut, cookie, birthday cake, cake slice=shortcake, cupcake, pie, chocolate bar,
        candy, lollipop, honey pot, milk=glass of milk, coffee cup=hot beverage, teapot, champagne bottle=bottle with popping
        cork, wine glass, cocktail=cocktail glass, beer mug, soda cup=cup with straw, bubble tea, juice box=beverage box, ice
        cube=ice, chopsticks, spoon, knife=kitchen knife, vase=amphora""",
    "vehicle": """
        steam train=locomotive, train, tram=tram car, bus, ambulance, fire truck=fire engine, police car, taxi,
        car=automobile, jeep=sport utility vehicle, pickup truck, truck=articulated lorry, tractor, race car=racing car,
        motorcycle, scooter=motor scooter, wheelchair=manual wheelchair, bicycle, skateboard, roller skate, sailboat, canoe,
        speedboat, ship, airplane, small plane=small airplane, helicopter, cable car=aerial tramway, satellite, rocket,
        ufo=flying saucer""",
    "place": """
        globe=globe showing Americas, mountain=snow-capped mountain, volcano, tent, beach umbrella=umbrella on ground,
        island=desert island, temple=classical building, crane=building construction, brick wall=brick, rock, hut, house,
        hospital, factory, pagoda=Japanese castle, castle, tower=Tokyo tower, church, fountain, carousel horse,
        slide=playground slide, ferris wheel, circus tent, desert, sunrise""",
    "sky": """
        full moon, crescent moon, sun, planet=ringed planet, star, cloud, rain cloud=cloud with rain, storm cloud=cloud with
        lightning, tornado, rainbow, umbrella, lightning bolt=high voltage, snowflake, snowman=snowman without snow, fire,
        water drop=droplet, wave=water wave""",
    "play": """
        pumpkin=jack-o-lantern, christmas tree=Christmas tree, balloon, party popper, ribbon, gift box=wrapped gift,
        medal=sports medal, trophy, soccer ball, baseball, basketball, volleyball, football=american football, tennis
        racket=tennis, bowling pins=bowling, ping pong, boxing glove, ice skate, fishing rod=fishing pole, snorkel=diving
        mask, skis, target=bullseye, yo-yo, kite, water gun=water pistol, crystal ball, magic wand, joystick, dice=game die,
        puzzle piece, teddy bear, disco ball=mirror ball, chess pawn, picture frame=framed picture, paint palette=artist
        palette, thread spool=thread, yarn ball=yarn, ghost, alien, robot""",
    "clothing": """
        glasses, sunglasses, t-shirt, jeans, scarf, gloves, coat, socks, dress, swimsuit=one-piece swimsuit, purse, handbag,
        backpack, sandal=thong sandal, sneaker=running shoe, hiking boot, high heel=high-heeled shoe, boot=woman’s boot,
        crown, straw hat=woman’s hat, top hat, graduation cap, baseball cap=billed cap, helmet=military helmet, lipstick,
        ring, diamond=gem stone""",
    "music": """
        megaphone, musical note, microphone, headphones=headphone, radio, saxophone, trumpet, accordion, guitar,
        piano=musical keyboard, violin, drum, maracas, flute, bell""",
    "tool": """
        scissors, hammer, axe, pickaxe=pick, crossed swords, boomerang, shield, saw=carpentry saw, wrench, screwdriver, gear,
        toolbox, magnet, ladder, chemistry flask=alembic, microscope, telescope, syringe, pill, bandage=adhesive bandage,
        broom, bucket, toothbrush, sponge, fire extinguisher, compass, anchor, thermometer, ruler=straight ruler, pencil,
        crayon, paintbrush, pushpin, magnifying glass=magnifying glass tilted left""",
    "object": """
        phone=mobile phone, telephone, battery, laptop, computer=desktop computer, keyboard, computer mouse, floppy disk,
        camera, television, candle, light bulb, flashlight, lantern=red paper lantern, red book=closed book, green book, blue
        book, open book, scroll, coin, money bag, credit card, envelope, cardboard box=package, mailbox=closed mailbox with
        raised flag, briefcase, calendar, padlock=locked, key, bomb, door, mirror, window, bed, couch=couch and lamp, chair,
        toilet, bathtub, basket, toilet paper=roll of paper, shopping cart, wheel, siren=police car light, traffic
        light=vertical traffic light, life buoy=ring buoy, suitcase=luggage, hourglass=hourglass done, watch, alarm clock,
        feather, paw prints, tooth, bone, red heart, blue heart, green heart, yellow heart""",
}

# Their 3D pictures are the example's training images.
EXAMPLE = """
    fox, penguin, turtle, bee, octopus, koala, red apple, hamburger, donut, strawberry, avocado, cupcake, croissant, cactus,
    tulip, mushroom, rocket, fire truck, sailboat, gift box, teapot, guitar, balloon, crown"""

# Their 3D pictures are used for evaluation only; none resembles an example.
HELD_OUT = """
    lion, frog, owl, cow, pig, whale, ladybug, butterfly, snail, elephant, unicorn, chick, watermelon, carrot, lemon, pineapple,
    pizza, broccoli, eggplant, ice cream, birthday cake, pancakes, sunflower, palm tree, pine tree, car, helicopter, bicycle,
    tractor, steam train, house, castle, umbrella, soccer ball, light bulb, trophy, teddy bear, camera, hammer, backpack"""

# Emoji that resemble an example or a held-out concept: no training may see them in 3D either.
TWINS = """
    cow, pig, pig nose, whale, mammoth, hatching chick, front-facing baby chick, green apple, Christmas tree, desert island,
    oncoming automobile, houses, derelict house, house with garden, closed umbrella, umbrella with rain drops,
    camera with flash, hammer and pick, hammer and wrench"""


def entries(text: str) -> dict[str, str]:
    """Parse a list of entries such as "cat" or "car=automobile". Return a dict from name to the emoji's own name, in the
    order of the list.
    """
    pairs = [(" ".join(entry.split())).partition("=") for entry in text.split(",")]
    return {name: own or name for name, _, own in pairs}
